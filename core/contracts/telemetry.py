"""Telemetry sink: a receiver of measurements. The engine's process calls sinks after each step and each request.

A sink must return quickly (it runs between two steps): its work does not grow with the number of requests of a step. It
must not raise; one that raises is reported once and switched off, and the engine goes on. The engine measures the
seconds that each sink takes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.contracts.executor import RankStatus
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.router import CacheEvent
from dovetail.contracts.step import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDescription:
    """One arm of an experiment on live traffic."""

    name: str
    share: float
    """Of the units that take part; the shares of an experiment sum to 1."""
    drafter: str | None
    """Label of the drafter that guesses for its requests; None: none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentDescription:
    """An experiment on live traffic: which arm a unit gets follows from this record and the unit's key alone."""

    name: str
    arms: tuple[ArmDescription, ...]
    """The others are compared with the first."""
    unit: str
    """What is drawn: "request", "user" (all requests of one user get one arm) or "slice" (all requests that arrive
    within one slice of time do)."""
    slice_s: float
    """Seconds of a slice; slices begin at whole multiples of it, counted in seconds of time.time()."""
    traffic: float
    """Share of the units that take part. Requests of others are served as configured."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a request got that takes part in an experiment on live traffic."""

    experiment: str
    arm: str
    unit_hash: str
    """Hexadecimal digits; requests with the same ones are of one unit. It does not show the unit's key."""
    slice: int | None
    """Number of the slice of time; None where the unit is another."""
    num_running: int
    """Sequences in the batch when the request came."""
    num_others: int
    """Requests that were under way when it came, and are not of its arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What an engine is; it changes only where the KV memory is replaced."""

    model: str
    """The model as the config names it: a path, or "hf:org/name"."""
    max_model_len: int
    """Most tokens of a request, prompt and output."""
    block_size: int
    """Tokens of a KV block."""
    num_blocks: int
    """KV blocks on the device that requests can get."""
    num_host_blocks: int
    """KV blocks in host memory, to which requests are swapped."""
    prefix_caching: bool
    kv_dtype: str
    drafter: str | None = None
    """Label of the drafter that guesses for requests which name none."""
    experiments: tuple[ExperimentDescription, ...] = ()
    """On live traffic. A request takes part in one at most."""
    max_loras: int = 0
    """Adapters that one step can apply; 0: requests with an adapter are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A request that got its first output token."""

    latency: float
    """Seconds since its arrival."""
    drafter: str | None = None
    """This and the following: as in `RequestStats`."""
    adapter: str = ""
    weight_version: int = 0
    assignment: Assignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step of the engine."""

    step_id: int
    time: float
    """time.monotonic() at the end of the step, in seconds."""
    duration: float
    """Seconds from scheduling to committed tokens."""
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    """Tokens computed in this step that belong to prompts."""
    num_generated_tokens: int
    num_preempted: int
    num_drafted: int
    num_accepted: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_query_tokens: int
    """Prompt tokens looked up in the prefix cache, since the engine started."""
    prefix_hit_tokens: int
    """Prompt tokens found in the prefix cache, since the engine started."""
    times: StepTimes
    num_draft_rounds: int = 0
    """Requests whose drafts were verified in this step; each also got a bonus token."""
    num_decoded: int = 0
    """Sequences that got output tokens in this step and had some before: each waited for them since its step before."""
    first_tokens: tuple[FirstToken, ...] = ()
    """Requests that got their first output token in this step. Of n completions the first counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarStats:
    """What the grammar of one request cost it."""

    form: str
    """As in `GrammarSpec.form`."""
    was_compiled: bool
    """Whether an earlier request had it compiled, so that this one did not wait."""
    wait: float | None
    """Seconds from the request's arrival in the engine until its grammar was compiled; None: it ended before that."""
    is_refused: bool = False
    """The grammar cannot be compiled, which ended the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """One finished request. Times are seconds of time.monotonic()."""

    request_id: str
    arrival_time: float
    first_scheduled_time: float | None
    """None: it ended before a step computed any of it."""
    first_token_time: float | None
    finish_time: float
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    """Of all its completions."""
    num_preemptions: int
    drafter: str | None = None
    """Label of the drafter that guessed for the request. This and the following, up to `drafter_error`, are defined as
    in `RequestOutput.metrics`."""
    num_draft_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    drafter_error: str | None = None
    speculation: str | None = None
    """What the request asked for: label of a drafter, "off", or None for the config's default."""
    drafter_is_idle: bool = False
    """Its drafter has not paid for long, so the request went without drafts of it."""
    adapter: str = ""
    """Name of the adapter that was added to the weights; "" for none."""
    weight_version: int = 0
    """How often the weights had been replaced when they computed the request."""
    n: int = 1
    """Completions that were asked for."""
    max_tokens: int | None = None
    """Most output tokens of a completion; None: as many as the model's length allows."""
    temperature: float = 1.0
    top_p: float = 1.0
    priority: int = 0
    is_salted: bool = False
    """Whether it had a cache salt: it shared prefixes with requests of the same salt only."""
    has_prompt_logprobs: bool = False
    """Whether log probabilities of the prompt were asked for: the whole prompt is computed then."""
    grammar: GrammarStats | None = None
    """None: the request asked for no form of its output."""
    error_type: str | None = None
    """Name of the class of the error that ended the request; "_OTHER" for an error without one, None where it did not
    fail."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """The headers `traceparent` and `tracestate` of W3C Trace Context that came with the request, as they came, by
    their names in lower case. A sink ignores a malformed one, as W3C demands."""
    assignment: Assignment | None = None
    """None: it takes part in no experiment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTotals:
    """What became of one drafter's guesses since the engine started; counted as in `RequestOutput.metrics`."""

    num_draft_rounds: int
    num_drafted: int
    num_accepted: int
    accepted_per_position: tuple[int, ...]
    num_errors: int
    """Completions that went on without the drafter, since it raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTotals:
    """What a sink has cost since the engine started."""

    name: str
    """As in the config, of "./file.py:Class" the class; with "#2" behind it where it is the second of that name."""
    seconds: float
    """Time that the engine spent in its calls."""
    is_on: bool
    """False once it raised: it is called no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One worker of the engine."""

    status: RankStatus
    kv_bytes: int
    """Of its KV pages that requests can get; drafters' layers among them on the rank that answers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorTotals:
    """What a KV connector has done since the engine started. A block has a record on each rank."""

    is_on: bool
    """False once it raised: it is called no more."""
    num_saved_blocks: int
    num_loaded_blocks: int
    num_dropped_blocks: int
    """Not saved, since the connector was slower than the engine."""
    num_failures: int
    """Records that some rank could not read or write."""
    num_corrupt: int
    """Records that were not what was written; their blocks were computed."""
    num_timeouts: int
    """Loads that were given up after `load_seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What holds for an engine now, also between steps and while it is idle."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_query_tokens: int
    """As in `StepStats`."""
    prefix_hit_tokens: int
    weight_version: int
    is_asleep: bool
    drafters: Mapping[str, DrafterTotals] = field(default_factory=dict)
    """By the drafter's label; without those that had no round yet."""
    sinks: tuple[SinkTotals, ...] = ()
    running_adapters: tuple[str, ...] = ()
    """Names of those that requests in the batch have."""
    waiting_adapters: tuple[str, ...] = ()
    """Names of those that requests have which wait, for the adapter itself among other things."""
    weight_checksum: str = ""
    """Of the weights' last update (`WeightsReport.checksum`); empty before the first."""
    external_query_tokens: int = 0
    """Prompt tokens that the prefix cache did not have and the KV connector was asked for."""
    external_hit_tokens: int = 0
    """Of these, tokens whose blocks were loaded."""
    ranks: tuple[RankState, ...] = ()
    """In rank order; empty where the executor says nothing of them."""
    connector: ConnectorTotals | None = None
    """None: the engine has no KV connector."""


class TelemetrySink(Plugin):
    """Receives measurements."""

    def __init__(self, options: PluginOptions):
        self.options = options

    def on_start(self, engine: EngineDescription) -> None:
        """The engine is ready. Called before all others, and again where the KV memory was replaced."""
        return None

    def on_step(self, stats: StepStats) -> None:
        """Takes the measurements of a step, after each step and after the requests that it finished."""
        return None

    def on_request(self, stats: RequestStats) -> None:
        """Takes the measurements of a request that finished or was aborted."""
        return None

    def close(self) -> None:
        """Called when the engine shuts down. Idempotent."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposition:
    """Metrics as text for those who scrape them."""

    content_type: str
    """Value of the HTTP header Content-Type."""
    body: bytes


class FollowsCache(TelemetrySink):
    """A sink that is notified of what enters and leaves the prefix cache. Engines note it only for listeners."""

    @abstractmethod
    def on_kv_events(self, events: Sequence[CacheEvent]) -> None:
        """Takes the changes of a step, or of a call between two steps, in their order; after the first `on_start`.

        The first call says what the cache has: `AllBlocksCleared`, and in a sink that was added to a running engine
        `BlocksStored` with the hashes alone. It must return at once, as `on_step` must.
        """


class Exposes(TelemetrySink):
    """A sink that can be scraped: it counts, and renders its counts when it is asked."""

    @abstractmethod
    def exposition(self, state: EngineState) -> Exposition:
        """Renders all metrics: what the sink counted, and `state`.

        Called from any thread, several at once too, while another thread is in `on_step` or `on_request`. It must not
        wait for the engine, and it changes no count. The size of the answer must not grow with the number of requests.
        Called after `on_start` only; what it raises is reported to the caller as a `PluginError`.
        """
