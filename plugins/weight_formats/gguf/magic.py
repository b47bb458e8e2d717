"""What a GGUF file begins with."""

from __future__ import annotations

MAGIC = b"GGUF"
