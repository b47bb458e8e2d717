from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dovetail.contracts.outputs import RequestOutput
from dovetail.engine.llm import LLM
from typing import Any

TrainerLogProbs = Callable[[Sequence[int], Sequence[int]], Sequence[float]]

@dataclass(frozen=True)
class LogprobDifference:
    num_sequences: int
    num_tokens: int
    mean: float
    p99: float
    max: float
    worst: tuple[int, int]
    bias: float
    kl: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    clip: float
    clipped: float
    effective: float
    def table(self) -> str: ...

def logprob_difference(
    outputs: Sequence[RequestOutput],
    trainer: TrainerLogProbs,
    *,
    clip: float = 0.2,
) -> LogprobDifference: ...
def transformers_log_probs(model: Any, *, temperature: float = 1.0) -> TrainerLogProbs: ...
def engine_log_probs(llm: LLM) -> TrainerLogProbs: ...
