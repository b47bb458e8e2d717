"""What a request brings back. The names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.pooling_params import PooledStates


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one token under the distribution that `SamplingParams.logprobs_mode` names: the raw one
    (before temperature, penalties and masks) unless processed ones were asked for."""

    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None
    """Its text; None without a tokenizer, and with `detokenize=False`."""
    surviving_mass: float | None = None
    """At this position, the probability of all tokens that min_p, top_k and top_p kept, after temperature and before
    they cut: logprob + log(surviving_mass) is the log probability without truncation. Above 0, at most 1. None for raw
    log probabilities."""


Span = tuple[int, int]
"""Position of the first of some tokens, and how many they are."""

PositionLogprobs = dict[int, Logprob]
"""Token id -> its log probability at one position; the token that stands there comes first."""


class _TokensOnDemand:
    """Slots of a completion whose tokens are copied when somebody first looks at them: while a completion streams, most
    of its cumulative outputs are replaced by the next before that, and copying each would take quadratic time."""

    __slots__ = ("_deferred",)

    def _keep(
        self, tokens: list[int], start: int, stop: int, positions: list[PositionLogprobs] | None, spans: Sequence[Span]
    ) -> None:
        self._deferred = tokens, start, stop, positions, spans, len(spans)

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for a slot that is not filled."""
            if name not in ("token_ids", "logprobs", "accepted_spans"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            tokens, start, stop, positions, spans, num_spans = self._deferred
            self.token_ids = tokens[start:stop]
            self.logprobs = positions[: stop - start] if positions is not None else None
            self.accepted_spans = spans[:num_spans]
            return {"token_ids": self.token_ids, "logprobs": self.logprobs}.get(name, self.accepted_spans)


@dataclass(slots=True)
class CompletionOutput(_TokensOnDemand):
    """One completion of a prompt."""

    index: int
    """0 to n - 1: which of the request's completions; with `best_of`, its rank by log probability per token."""
    text: str
    """All so far, or what is new where `output_kind` is "delta"."""
    token_ids: list[int]
    """Likewise; with the token that ended the completion, whose text is left out."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far; None unless logprobs or best_of were asked for."""
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort", "error", or None while the completion goes on."""
    stop_reason: int | str | None = None
    """The stop token id or string that ended it; None for end-of-sequence."""
    accepted_spans: Sequence[Span] = ()
    """Of `token_ids`, those that a drafter guessed and the target accepted; in order, apart from each other."""

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def defer_tokens(
        self, tokens: list[int], start: int, stop: int, positions: list[PositionLogprobs] | None, spans: Sequence[Span]
    ) -> None:
        """Has `token_ids` (`tokens[start:stop]`), `logprobs` (as many `positions`) and `accepted_spans` copied when one
        of them is first looked at. All lists may only grow."""
        del self.token_ids, self.logprobs, self.accepted_spans
        self._keep(tokens, start, stop, positions, spans)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic(), and its counts.

    Outputs before the last share one object, which goes on until the request is finished. The last output has its
    own, which nothing changes any more.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    """Of the completions that have ended."""
    num_generated_tokens: int = 0
    """Output tokens of the completions that have ended, those that `best_of` drops included."""
    drafter: str | None = None
    """Name of the drafter that guesses for the request; None: none does."""
    num_draft_rounds: int = 0
    """Rounds: steps in which at least one guess was verified. A round yields the guesses that stand and one token
    more, the bonus token, which the target draws itself; so there are as many bonus tokens as rounds."""
    num_drafted: int = 0
    """Guesses that were verified. Those that the drafter gave and nobody verified do not count."""
    num_accepted: int = 0
    """Of these, how many stood by the verdict of the acceptance rule, those behind a token or stop string that ended
    the request included. Bonus tokens do not count."""
    drafted_per_position: list[int] = field(default_factory=list)
    """Rounds in which at least this many guesses in a row were verified (of a tree: its depth): entry 0 for one, ..."""
    accepted_per_position: list[int] = field(default_factory=list)
    """Rounds in which at least this many drafts stood: entry 0 for one draft, entry 1 for two, ... As long as
    `drafted_per_position`, with zeros where none stood."""
    drafter_error: str | None = None
    """Why the request went on without its drafter."""
    num_drafted_from_prediction: int = 0
    """Of the guesses that were verified, those that were read from the request's prediction."""
    num_accepted_from_prediction: int = 0
    """Of these, how many stood."""

    @property
    def acceptance_rate(self) -> float | None:
        """num_accepted / num_drafted; None where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens of a round, the bonus token included: 1 + num_accepted / num_draft_rounds; None without a round."""
        return 1 + self.num_accepted / self.num_draft_rounds if self.num_draft_rounds else None


@dataclass(frozen=True, slots=True)
class TokenProgress:
    """How far requests are that have not finished."""

    num_prompt_tokens: int
    """Prompt tokens that were computed, or found in the prefix cache."""
    num_output_tokens: int


@dataclass(slots=True)
class SpeculationTotals:
    """What became of one drafter's guesses since the engine started; counted as in `RequestMetrics`."""

    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    num_drafter_errors: int = 0
    """Completions that went on without the drafter."""


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """By index. Where `output_kind` is "delta", those that have something new."""
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One entry per prompt token, the first None; present where `prompt_logprobs` was asked for."""
    error: str | None = None
    """Why the request failed, where finish_reason is "error"."""
    weight_version: int = 0
    """Of the engine's weights when the request came: 0 for those of the start; an update, or
    `wake_up(new_weights=True)`, brings a higher one."""

    is_delta: bool = False
    """Whether `outputs` have only what is new (`output_kind` "delta")."""
    lora_request: LoRARequest | None = None
    """The adapter that was added to the weights, as it was asked for."""
    pooled: PooledStates | None = None
    """The result of a request with `PoolingParams`, whose one completion is empty; `PoolingRequestOutput.from_request`
    makes vLLM's output of it. None of a request that generates, and of one that failed."""
    weight_checksum: str = ""
    """Of the weights of that version (`WeightsReport.checksum`); empty for those of the checkpoint."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """What the same request to another engine says, so that it takes the prompt's KV blocks from here. Of the last
    output, where the request said `do_remote_decode` and the engine's KV connector lets others read."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.metrics.num_cached_tokens


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam, best first in `BeamSearchOutput.sequences`."""

    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float
    score: float
    """cum_logprob / (output length ** length_penalty)."""
    text: str
    """Text of the output tokens; empty without a tokenizer."""
    finish_reason: str
    """"stop" or "length"."""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt."""

    sequences: list[BeamSearchSequence]
