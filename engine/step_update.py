"""What one step brought its requests: token ids and endings, without text. It is all that leaves the engine for a
step, in this process or to another one."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.contracts.outputs import RequestMetrics
from dovetail.contracts.pooling_params import PooledStates
from dovetail.contracts.step import TokenLogprobs

GRAMMAR_REFUSED = "grammar"
"""`stop_reason` of a request that ended since its grammar cannot be compiled."""


@dataclass(slots=True)
class SequenceEnd:
    """A sequence that ended."""

    seq_id: int
    finish_reason: str
    stop_reason: int | str | None
    error: str | None
    num_output_tokens: int
    """Of its output this many tokens count: behind one that ended it there may be others in the same step."""
    token_ids: list[int] | None
    """The whole output of a sequence whose tokens were not reported step by step."""
    accepted_spans: list[tuple[int, int]] = field(default_factory=list)
    """Likewise of such a sequence: see `StepUpdate.accepted_spans`."""
    pooled: PooledStates | None = None
    """The result of a sequence that was pooled; None for one that generated, or failed."""


@dataclass(slots=True)
class StepUpdate:
    """The news of one step. Sequences that do not stream (`RequestTable.add`) are only among `ends`."""

    seq_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """New tokens of all `seq_ids`, concatenated in their order."""
    counts: list[int] | None = None
    """Number of tokens of each of `seq_ids`; None: 1 each."""
    ends: list[SequenceEnd] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By seq_id, of its new tokens, whether it streams or not."""
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    """By request id: position of the first of the prompt tokens that were computed, and their entries."""
    accepted_spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By seq_id: of its new tokens, those that are accepted drafts, as (position in the output, number)."""
    metrics: dict[str, RequestMetrics] = field(default_factory=dict)
    """By request id, of requests that got their first token, and of those that are finished."""

    @property
    def has_news(self) -> bool:
        """Whether there is anything in it."""
        return bool(self.seq_ids or self.ends or self.logprobs or self.prompt_logprobs or self.metrics)


@dataclass(frozen=True, slots=True)
class TextStop:
    """A sequence that a stop string ended, which the engine cannot see."""

    seq_id: int
    stop: str
    num_output_tokens: int
    """Of its output this many tokens count."""
