"""EngineClient: an engine as coroutines see it, in this process or in another.

`AsyncLLMEngine` runs the engine in a thread of this process. `RemoteEngine` speaks to an engine in a process of its
own: prompts are tokenized and text is made where the client is, token ids travel. `ReplicatedEngine` speaks to several
of these as to one. All raise the same errors:

    RequestError    the request is refused, or failed; the engine and other requests are unharmed
    GrammarError    the form that the request asks of its output cannot be kept to: the stream raises it
    QueueFull       the engine takes no more requests for now
    WorkerError     the engine died; a remote one may come back (`is_running`)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import PauseMode
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.regions import RegionStatus
from dovetail.contracts.sampling import RAW_LOGPROBS, SamplingParams
from dovetail.contracts.telemetry import Exposition, RequestStats
from dovetail.contracts.weight_transport import WeightsReport


@dataclass(frozen=True, kw_only=True)
class DialectFacts:
    """The dialect that the config names, for clients to create."""

    name: str
    """As the config names it."""
    reference: str
    """What to import: "package.module:Class" or "/absolute/file.py:Class"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """`DialectSetup.special_tokens` of the engine's tokenizer."""
    chat_template: str = ""
    """`DialectSetup.chat_template`."""


@dataclass(frozen=True, kw_only=True)
class GrammarFacts:
    """The grammar plugin of an engine."""

    name: str = ""
    forms: tuple[str, ...] = ()
    """`GrammarCapabilities.forms`, in order."""
    refusal: str = ""
    """Why requests with a grammar are refused; empty where they are served."""


@dataclass(frozen=True, kw_only=True)
class RuleFacts:
    """What requests need to know of an acceptance rule."""

    sampling: bool
    """Whether it serves temperatures other than 0."""
    trees: bool
    """Whether it judges trees."""


@dataclass(frozen=True, kw_only=True)
class PoolingFacts:
    """What an engine does with requests that have `PoolingParams`."""

    poolers: Mapping[str, str] = field(default_factory=dict)
    """By task that is served, the name of its pooler."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """By task that is refused, why."""
    skips_prefix: frozenset[str] = frozenset()
    """Tasks whose requests may read the prefix cache (`PoolerCapabilities.skips_prefix`)."""
    hidden_size: int = 0
    """Dimensions of an embedding."""
    num_labels: int = 0
    """Labels of the checkpoint's score head; 0: it has none."""
    labels: tuple[str, ...] = ()
    """Their names, as its config has them, or "LABEL_0", "LABEL_1", ..."""
    normalizes: bool = True
    """Whether embeddings get length 1 where a request does not say."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What clients know of an engine. It travels between processes, so everything in it is plain data."""

    model: str
    """The config's `model.path`."""
    max_model_len: int
    """Most tokens of a sequence, prompt and output."""
    vocab_size: int
    """Logits of a token."""
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    """Most alternatives a request may ask for; -1: the vocabulary."""
    logprobs_mode: str = RAW_LOGPROBS
    """`SamplingParams.logprobs_mode` of requests that name none."""
    max_completions: int
    """Most completions (n, best_of) of a request."""
    scheduler: str
    """Name of the scheduler."""
    has_priorities: bool
    """Whether the scheduler reads a request's priority."""
    processors: tuple[str, ...] = ()
    """Labels of the configured logits processors."""
    drafters: tuple[str, ...] = ()
    """Labels of the configured drafters."""
    default_drafter: str | None = None
    experiments: tuple[str, ...] = ()
    """Names of experiments on live traffic, which may give a request that names no drafter another than the default."""
    acceptance: str | None = None
    """Name of the acceptance rule."""
    accepts_sampling: bool = True
    """Whether the acceptance rule serves temperatures other than 0."""
    rules: Mapping[str, RuleFacts] = field(default_factory=dict)
    """By name, further acceptance rules, which requests name (`SamplingParams.acceptance`)."""
    tree_drafters: frozenset[str] = frozenset()
    """Labels of the drafters that propose trees."""
    prediction_drafters: frozenset[str] = frozenset()
    """Labels of the drafters that guess from predictions (`SamplingParams.prediction`)."""
    drafts_without_logprobs: bool = False
    """Requests with a drafter may not ask for log probabilities."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the model's generation config recommends."""
    grammar: GrammarFacts = GrammarFacts(refusal="this engine has no grammar plugin")
    """What serves `SamplingParams.structured_outputs`."""
    block_size: int = 0
    """Tokens of a KV block: prefixes are cached in whole blocks."""
    prefix_caching: bool = False
    architecture: str = ""
    """First of `architectures` in the model's config.json."""
    max_loras: int = 0
    """Adapters that one step can apply; 0: requests with an adapter are refused."""
    dialect: DialectFacts | None = None
    """None: the engine has no tokenizer, or no dialect."""
    pooling: PoolingFacts = PoolingFacts()
    num_token_types: int = 0
    """Types that the tokens of a prompt may have (`TokensPrompt`); 0: they have none."""
    why_not_generate: str = ""
    """Why requests with `SamplingParams` are refused; empty: the model generates."""
    num_workers: int = 1
    """Workers of the engine, each of which receives new weights."""
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)
    """By which requests in another engine find the KV blocks that this one computed; empty: none can."""


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """What an engine would do for a request, as far as it is known before the request runs."""

    num_prompt_tokens: int
    max_tokens: int
    """Most output tokens of a completion: as asked for, or fewer where the model's length ends before."""
    drafter: str | None
    """Label of the drafter that would guess; None: none."""
    grammar_form: str | None
    """As in `GrammarSpec.form`; None: the output is free."""


@dataclass(frozen=True, kw_only=True)
class RequestReport:
    """One request that an engine has, or had."""

    state: str
    """"finished", or of the first completion that has not ended: "waiting", "running", "preempted", "swapped", "held",
    "compiling" (it waits for its grammar) or "loading" (it waits until its adapter is read)."""
    stats: RequestStats
    """Of a request that has not finished: up to now, with `finish_time` the time of the report and `finish_reason`
    empty."""


@dataclass(frozen=True, kw_only=True)
class RequestReports:
    """What an engine knows of some requests."""

    requests: tuple[RequestReport, ...]
    """Those that have not finished first, each in order of arrival or end."""
    num_kept: int
    """Requests that the engine remembers after their end, at most."""


class RequestStream(Protocol):
    """The outputs of one request that was accepted."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Outputs as they come; those that nobody read yet are merged. The last has `finished` set. Raises
        `RequestError` where the request failed, `WorkerError` where the engine died."""

    def close(self) -> None:
        """Nobody reads any more: the request is aborted, unless it is finished. Idempotent; does not wait."""


class EngineClient(Protocol):
    """Requests in, outputs out. Coroutines of any number may use it at once."""

    @property
    def facts(self) -> EngineFacts:
        """About the engine."""

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """Returns once the prompt is tokenized and the engine has the request. Raises `RequestError` for one that is
        refused. Lower `priority` runs first; requests with the same `cache_salt` share prefix-cache entries;
        `trace_headers` is the W3C trace context that the request belongs to; `user` says for whom it is, to experiments
        that give all requests of one user the same arm; `lora_request` names an adapter that is added to the weights;
        where it is not loaded, the request waits for it. With `PoolingParams` the stream has one output, whose `pooled`
        is the result."""

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish_reason "abort". Unknown ids are ignored."""

    async def plan_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestPlan:
        """What `submit` would ask of the engine; nothing runs. Raises `RequestError` for what `submit` refuses, except
        for values of logits processors and a queue that is full, which only the engine's own process knows."""

    async def explain_request(self, request_id: str) -> RequestReports:
        """What became of the request with this id, and of those whose ids go on behind it with a hyphen: a server's
        response with several prompts is several requests. Empty for ids that the engine does not know, or no longer.
        At once, while a step runs too. The reports hold counts and times, no text and no token ids."""

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `RequestError` where the engine has no tokenizer."""

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Raises `RequestError` for what is no token id."""

    async def pair_prompt(self, first: Prompt, second: Prompt, *, truncate_prompt_tokens: int | None = None) -> Prompt:
        """Two texts, or two lists of token ids, as the one prompt that a cross-encoder reads: texts joined, and their
        tokens typed, as the tokenizer pairs them. With `truncate_prompt_tokens` the ends of the texts are left out
        until there are no more tokens than that, of the longer text first; special tokens stay. Raises `RequestError`
        for one of each, and for text where the engine has no tokenizer."""

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """The prompt of a conversation, by the model's chat template. `options`: chat_template,
        add_generation_prompt, continue_final_message, tools, required_prefix_token_ids, keep_rewritten, and variables
        of the template. `required_prefix_token_ids`: prompt and completion of the last turn as the model saw and
        produced them, which the prompt begins with where the template leaves their text as it was
        (`ChatPrompt.prefix` says whether); with `keep_rewritten` also where the template writes other text for the same
        turns. Raises `RequestError`."""

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """The text of each token, special ones included; bytes that are no UTF-8 become U+FFFD."""

    async def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """Reads an adapter and checks it, so that requests may name it; steps go on meanwhile. Raises `RequestError`
        for what is no adapter of this model, `AdapterNotFound` where its folder is not there, `AdapterConflict` for a
        name that another adapter has, for files that changed since they were read, and for an adapter that was removed
        while it was read."""

    async def remove_lora(self, adapter: str | int) -> None:
        """Unloads an adapter, by name or number. Raises `AdapterNotFound`, and `AdapterConflict` while requests use
        it."""

    async def list_loras(self) -> list[LoadedLoRA]:
        """The adapters that are loaded."""

    async def pin_lora(self, adapter: str | int) -> None:
        """An adapter keeps its slot once it has one. Raises `AdapterNotFound`, and `RequestError` where no slot would
        be left for others."""

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Holds requests that come from now on, until `resume`. Returns once nothing is computed for the others either:
        they end ("abort"), have run to their ends ("wait") or are held where they are ("keep"). Raises `RequestError`
        for another mode."""

    async def resume(self) -> None:
        """Requests go on from where they are. Without effect where nothing is paused. Raises `EngineConflict` while the
        engine sleeps."""

    async def is_paused(self) -> bool:
        """Whether new requests are held."""

    async def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """Gives memory back; returns the bytes. Level 1 sets the weights aside, level 2 reads them again. KV blocks are
        lost: requests that a pause holds are computed again. `tags`: names of regions; None: all. Raises
        `EngineConflict` while others are unfinished, or a region sleeps; `RequestError` for what is no region,
        `ConfigError` for another level."""

    async def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """Takes memory again. `tags`: names of regions; None: all that sleep. Raises `EngineConflict` for a region that
        is awake, and for a KV cache before the weights; `ModelError` where after level 2 the checkpoint is another one,
        unless `new_weights` takes what is there. With `for_update` weights of level 2 are not read: they are invalid
        until an update brings all of them, and the KV cache sleeps on."""

    async def regions(self) -> tuple[RegionStatus, ...]:
        """The states of its memory: weights, KV cache, the weights of each drafter."""

    async def is_sleeping(self) -> bool:
        """Whether `wake_up` must come before requests."""

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """Connects the config's `weight_transport` to whoever sends; once for any number of updates. `init_info`: what
        the transport takes; plain data, as in JSON, where the engine is in another process. Raises `RequestError` where
        the config names no transport, `WeightUpdateConflict` during an update."""

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """Begins an update, and returns its version: `weight_version`, or one more than the present one. `partial`:
        weights that do not come stay as they are. `is_checkpoint_format`: nothing else is served. Raises
        `WeightUpdateConflict` before `init_weight_transfer_engine`, during another update, while requests are
        unfinished that no pause holds, while the weights sleep, and for a version that is not higher."""

    async def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """Receives one bucket. `update_info`: what the transport takes, as in `init_weight_transfer_engine`. `drafter`:
        the label of the drafter whose weights these are; None: the model's. Raises `WeightUpdateConflict` where no
        update is under way; `RequestError` and `ModelError` where the bucket cannot be used or does not arrive, which
        ends the update."""

    async def finish_weight_update(self) -> WeightsReport:
        """Writes the weights on all workers; requests that a pause holds are computed again. Raises `ModelError` with
        names and shapes where tensors are missing, unknown or of another shape: the update has ended, and the old
        weights serve on."""

    async def abort_weight_update(self) -> None:
        """Ends the update that is under way, if there is one; the old weights serve on."""

    async def weights(self) -> WeightsReport:
        """The weights that the engine has."""

    async def metrics(self) -> Exposition:
        """Everything that was counted since the engine started."""

    async def check_health(self) -> None:
        """Returns where the engine answers; raises `WorkerError` with what ended it."""
