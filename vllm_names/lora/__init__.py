"""vLLM's names for adapters."""

from __future__ import annotations

from dovetail.vllm import missing

__getattr__ = missing.answering(__name__)
