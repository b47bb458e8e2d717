"""Where vLLM has its config objects. Settings are keywords, a mapping or a file here; the names answer with which."""

from __future__ import annotations

from dovetail.vllm.missing import answering

__all__: list[str] = []

__getattr__ = answering(__name__)
