"""vLLM's names of outputs."""

from __future__ import annotations

from dovetail.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from dovetail.vllm.missing import missing_name

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "RequestOutput"]


def __getattr__(name: str) -> object:
    raise AttributeError(missing_name(name))
