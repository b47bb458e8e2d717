"""vLLM's names of outputs."""

from __future__ import annotations

from dovetail.contracts.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from dovetail.vllm.missing import answering

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "RequestOutput"]

__getattr__ = answering(__name__)
