"""Errors that mean that a GPU has no memory left, in the words of torch, CUDA's libraries and Triton."""

from __future__ import annotations

import torch

_TEXTS = (
    "CUDA error: out of memory",  # cudaErrorMemoryAllocation, which an AcceleratorError carries: of a graph, say
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` is one of them; the device itself goes on."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, torch.OutOfMemoryError) or any(part in text for part in _TEXTS)
