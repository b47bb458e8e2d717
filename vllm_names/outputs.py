"""vLLM's names of outputs."""

from __future__ import annotations

from typing import NoReturn

from dovetail.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from dovetail.vllm.missing import answer_import

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "RequestOutput"]


def __getattr__(name: str) -> NoReturn:
    answer_import(__name__, name, {})
