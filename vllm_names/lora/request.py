"""vLLM's name of an adapter that requests name."""

from __future__ import annotations

from dovetail.contracts.lora import LoRARequest
from dovetail.vllm import missing

__all__ = ["LoRARequest"]

__getattr__ = missing.answering(__name__)
