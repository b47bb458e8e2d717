"""vLLM's name of what is made of a prompt's hidden states."""

from __future__ import annotations

from dovetail.contracts.pooling_params import PoolingParams
from dovetail.vllm import missing

__all__ = ["PoolingParams"]

__getattr__ = missing.answering(__name__)
