"""vLLM's older name of `AsyncLLM`."""

from __future__ import annotations

from dovetail.vllm.v1.engine.async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncLLMEngine"]
