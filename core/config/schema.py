"""The configuration tree as it is written: one pydantic model per section.

A component (`ComponentSection`) is a name, or a mapping with a name and options. Keys that the section does not
declare are the plugin's own options; the plugin's `Options` validates them when the configuration is resolved.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kinds import DEFAULTS_GROUP
from dovetail.contracts.pooling_params import TASKS

AUTO: Final = "auto"

ModelDtype = Literal["auto", "float64", "float32", "float16", "bfloat16"]
CacheDtype = Literal["auto", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
_LABEL = r"^[A-Za-z0-9_-]+$"
Label = Annotated[str, Field(pattern=_LABEL)]
"""A name that the config itself gives to something: it must be reachable as a part of a dotted key."""


def _installed_default(key: str) -> Any:
    """What an installed package gives as default. Raises `ConfigError` where none does."""
    for point in metadata.entry_points(group=DEFAULTS_GROUP, name=key):
        # A package can be left out of a source tree that lists it.
        with contextlib.suppress(ImportError):
            return point.load()
    raise ConfigError(f"{key} is missing, and no installed package gives a default: set {key}")


class Section(BaseModel):
    """A section whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ComponentSection(BaseModel):
    """A plugin's name beside the section's own keys and the plugin's options."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str = Field(
        default=AUTO, min_length=1, description="Plugin name, `dist:name`, `pkg.mod:Class`, `./file.py:Class`"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are the plugin's to validate."""
        return dict(self.model_extra or {})


class NamedSection(ComponentSection):
    """A component that cannot be `auto`: there is no need that would tell candidates apart."""

    name: str = Field(min_length=1, description="Plugin name, `dist:name`, `pkg.mod:Class`, `./file.py:Class`")


class ModelSection(Section):
    """What to load, and how its text and numbers are read."""

    path: str = Field(
        default_factory=partial(_installed_default, "model.path"),
        min_length=1,
        description="`./dir`, `file.gguf`, `org/name` or `scheme:reference`",
    )
    revision: str | None = Field(default=None, description="Revision, for sources that have any")
    tokenizer: str | None = Field(default=None, description="Directory of a tokenizer other than the model's own")
    tokenizer_mode: Literal["auto", "slow", "mistral", "none"] = Field(
        default=AUTO,
        description="mistral: Mistral's own files, through the package mistral-common; none: token ids in and out, "
        "nothing is tokenized or detokenized",
    )
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        description="Chat template other than the model's own: a file, or the template itself, which has `{` in it",
    )
    generation_config: str = Field(
        default=AUTO,
        min_length=1,
        description="Sampling defaults of requests and end-of-sequence ids. auto: the model's generation_config.json; "
        "none: nothing; or a directory that has one",
    )
    override_generation_config: dict[str, Any] = Field(
        default_factory=dict, description="Replaces keys of the generation config"
    )
    dtype: ModelDtype = Field(default=AUTO, description="dtype of weights and activations")
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest sequence, prompt and output; null: the model's"
    )
    seed: int = Field(default=0, ge=0, description="Root of the random streams of requests without a seed")
    max_logprobs: int = Field(
        default=20, ge=-1, description="Most alternatives a request may ask for; -1: the vocabulary"
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        default="raw_logprobs",
        description="Log probabilities of requests that do not say which: of the model, or of the distribution that "
        "tokens are drawn from",
    )
    max_completions: int = Field(
        default=1024, ge=1, description="Most completions (n, best_of) or beams that a request may ask for"
    )
    hf_overrides: dict[str, Any] = Field(default_factory=dict, description="Replaces keys of the model's config.json")
    family: ComponentSection = Field(default=ComponentSection(), description="Model family")
    weight_format: ComponentSection = Field(default=ComponentSection(), description="Checkpoint format")
    source: ComponentSection = Field(default=ComponentSection(), description="Where references are looked up")
    quantization: ComponentSection | None = Field(
        default=ComponentSection(),
        description="How linear layers hold their weights; auto: packed ones as they are, others in full precision; "
        "null: full precision",
    )
    packed_cache_gib: float = Field(
        default=2.0,
        ge=0,
        description="Room on disk for quantized weights, which later starts read instead of packing them anew; 0: none",
    )
    operators: ComponentSection | None = Field(
        default=ComponentSection(), description="Norms, activations, rotations; null: plain torch, nobody is asked"
    )

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class CacheSection(Section):
    """The KV memory. Sizes are per rank."""

    block_size: int = Field(default=16, ge=1, description="Tokens per KV block")
    dtype: CacheDtype = Field(
        default=AUTO,
        description="dtype of keys and values; auto: float16 with quantized weights, otherwise the model's",
    )
    memory_gib: float | None = Field(default=None, gt=0, description="KV memory in GiB")
    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the device's memory for weights, activations and KV (CPU: for KV alone)",
    )
    num_blocks: int | None = Field(default=None, ge=2, description="KV blocks, instead of a size in bytes")
    prefix_caching: bool = Field(default=True, description="Share the blocks of equal prefixes")
    swap_gib: float = Field(
        default=0.0, ge=0, description="Host memory in GiB for preempted requests; 0: recompute them"
    )


class ExecutorSection(ComponentSection):
    """Where the model runs."""

    tensor_parallel: int = Field(default=1, ge=1, description="Ranks that share each layer")
    pipeline_parallel: int = Field(
        default=1, ge=1, description="Pipeline stages: groups of ranks, each of which has some of the layers"
    )
    stage_layers: list[int] | None = Field(
        default=None, description="Layers of each pipeline stage, as in [14, 16]; null: stages of equal cost"
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of each worker; null: the executor's choice"
    )
    enforce_eager: bool = Field(default=False, description="Capture and replay nothing, whatever the executor would do")

    @property
    def num_ranks(self) -> int:
        """Workers, over all pipeline stages."""
        return self.tensor_parallel * self.pipeline_parallel


class SchedulerSection(ComponentSection):
    """Which requests run in a step, and its limits."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="Tokens computed in one step")
    max_num_seqs: int = Field(default=256, ge=1, description="Requests in one step")
    enable_chunked_prefill: bool = Field(default=True, description="Compute long prompts in several steps")
    max_num_partial_prefills: int = Field(default=1, ge=1, description="Prompts computed in part in one step")
    max_long_partial_prefills: int = Field(default=1, ge=1, description="Of these, how many may be long")
    long_prefill_token_threshold: int | None = Field(
        default=None, ge=0, description="Prompts with more tokens left are long; 0: none is"
    )


OFF = "off"
"""What a request, or `--speculative`, says to go without speculation (`SamplingParams.speculation`)."""


class DrafterSection(NamedSection):
    """One draft worker."""

    num_tokens: int = Field(default=4, ge=1, description="Most guesses per round")
    length: str | NamedSection = Field(
        default_factory=partial(_installed_default, "speculative.drafters.*.length"),
        description="Guesses per round. adaptive: what is measured to pay, down to none; fixed: always num_tokens; "
        "confidence: as far as the drafter trusts itself; or another draft length, by name or with its options",
    )
    min_confidence: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="With length confidence: a draft ends where the product of the drafter's confidences gets smaller",
    )
    attention: ComponentSection | None = Field(
        default=None, description="Backend of the drafter's own attention layers; null: auto where it has any"
    )


class SpeculativeSection(Section):
    """Drafters by name, the one that requests get by default, and the rule that says which drafts stand."""

    drafters: dict[Label, DrafterSection] = Field(min_length=1)
    default: str | None = Field(
        default=AUTO, description="auto: the only drafter; null: only for requests that name one"
    )
    acceptance: ComponentSection = ComponentSection()
    rules: dict[Label, NamedSection] = Field(
        default_factory=dict, description="By name, further acceptance rules, for requests that name one"
    )
    disable_by_batch_size: int | None = Field(
        default=None, ge=0, description="No guesses in steps of more requests than this"
    )
    disable_logprobs: bool = Field(
        default=False, description="Refuse requests that want a drafter and log probabilities of their output"
    )


class ArmSection(Section):
    """One arm of an experiment on live traffic."""

    speculation: str | None = Field(
        default=None, description="Drafter of its requests, or off; null: speculative.default"
    )
    share: float = Field(default=1.0, gt=0, description="Weight: the arm's part of the sum of all shares")

    @field_validator("speculation", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return OFF if value is False else value  # YAML's reading of a bare off


class ExperimentSection(Section):
    """Live traffic split between arms."""

    arms: dict[Label, ArmSection] = Field(min_length=2, description="By name; the others are compared with the first")
    unit: Literal["request", "user", "slice"] = Field(
        default="slice",
        description="What is drawn. slice: all requests get one arm for slice_s seconds; user: all requests of one "
        "user do; request: each request by itself",
    )
    slice_s: float = Field(default=60.0, gt=0, description="Seconds of a slice")
    traffic: float = Field(
        default=1.0, gt=0, le=1, description="Share of the units that take part; others are served as configured"
    )
    seed: int = Field(default=0, ge=0, description="Another seed draws anew")


class LoRASection(Section):
    """Low-rank adapters over the model's weights."""

    enabled: bool = Field(default=False, description="Requests may name an adapter (LoRA); they take memory")
    max_loras: int = Field(default=1, ge=1, description="Adapters that one step can apply, each in a slot of its own")
    max_rank: int = Field(default=16, ge=1, le=1024, description="Largest rank of an adapter; sizes the slots")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="dtype of adapters in their slots, to which wider ones are rounded; auto: the model's",
    )
    max_cpu_loras: int | None = Field(
        default=None, ge=1, description="Adapters that each worker keeps in host memory; null: max_loras"
    )
    modules: dict[str, str] = Field(
        default_factory=dict, description="Adapters that are loaded at the start: name -> folder with PEFT's files"
    )


class GrammarSection(ComponentSection):
    """What compiles the grammars of structured outputs, and what one grammar may take."""

    source_bytes: int | None = Field(
        default=None, ge=1, description="Most bytes of one grammar, as it is written; null: 1 MiB"
    )
    compile_seconds: float | None = Field(default=None, gt=0, description="Longest compilation; null: 10 seconds")
    compile_gib: float | None = Field(default=None, gt=0, description="Most memory of a compilation in GiB; null: 1")
    wait_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Longest that a request waits for its grammar, whatever the plugin does; null: 60 seconds",
    )
    read_ahead: bool | None = Field(
        default=None,
        description="Read the vocabulary while the engine starts, and not for the first grammar; null: in servers",
    )


class KVConnectorSection(NamedSection):
    """Where full KV blocks are kept besides the device."""

    load_seconds: float | None = Field(
        default=None, gt=0, description="Longest that a request waits for blocks before it computes them; null: 10"
    )
    queue_gib: float | None = Field(
        default=None, gt=0, description="Most host memory of a rank for blocks that wait to be saved in GiB; null: 1"
    )


SECRET = "**********"
"""What stands for a secret wherever a configuration is shown or written."""


class CORSSection(Section):
    """Which pages of other origins may call the server."""

    allow_origins: list[str] = Field(default_factory=list, description="Origins, or `*`; empty: none")
    allow_methods: list[str] = ["*"]
    allow_headers: list[str] = ["*"]
    allow_credentials: bool = False

    @model_validator(mode="after")
    def _no_credentials_for_all(self) -> Self:
        if self.allow_credentials and "*" in self.allow_origins:
            raise ValueError(
                "allow_credentials with the origin * lets every page act for its visitor: name the origins, or leave"
                " allow_credentials off"
            )
        return self


class TLSSection(Section):
    """HTTPS."""

    certfile: str = Field(min_length=1, description="The certificate, PEM")
    keyfile: str | None = Field(default=None, description="Its private key; null: in certfile")
    ca_certs: str | None = Field(default=None, description="Who signs the certificates of clients")
    cert_reqs: Literal[0, 1, 2] = Field(
        default=0, description="Certificates of clients: 0 none, 1 optional, 2 required (ssl.VerifyMode)"
    )
    ciphers: str | None = Field(default=None, description="OpenSSL's list of ciphers; null: Python's")


class RestartSection(Section):
    """What happens when the engine's process dies."""

    policy: Literal["never", "on_failure"] = "on_failure"
    max_restarts: int = Field(default=3, ge=0, description="Within window_s; one more ends the server")
    window_s: float = Field(default=300.0, gt=0)


class ServerSection(Section):
    """The HTTP server. Engines do not read it, `dovetail serve` does."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0: every one")
    port: int = Field(default=8000, ge=0, le=65535, description="0: a free one")
    uds: str | None = Field(default=None, description="Path of a Unix socket, in place of host and port")
    api_server_count: int = Field(default=1, ge=1, description="Processes that speak HTTP")
    data_parallel_size: int = Field(default=1, ge=1, description="Replicas of the engine, each with all of the model")
    data_parallel_devices: list[str] = Field(default=[], description="CUDA_VISIBLE_DEVICES of each; empty: shares")
    router: ComponentSection = Field(default=ComponentSection(), description="Which replica takes a request")
    retries: int = Field(default=2, ge=0, description="Moves of a request whose replica dies before its first output")
    served_model_name: list[str] = Field(
        default_factory=list,
        description="Names that requests may give as `model`, the first of which responses show; empty: model.path",
    )
    api_keys: list[SecretStr] = Field(
        default_factory=list, description="Requests need one of them; empty: everybody may call"
    )
    routes: dict[Label, NamedSection | None] = Field(
        default_factory=dict,
        validate_default=True,
        description="Endpoints, by label, besides those that are installed as defaults; null switches one off",
    )
    root_path: str = Field(default="", pattern=r"^(/.*[^/])?$", description="Prefix of paths that a proxy takes off")
    docs: bool = Field(default=True, description="Serve /docs and /openapi.json")
    request_chat_templates: bool = Field(
        default=True, description="Requests may bring a chat template of their own, which runs in a sandbox"
    )
    max_body_mib: float = Field(default=8.0, gt=0, description="Longest body of a request")
    header_timeout_s: float = Field(default=10.0, gt=0, description="For the request line and headers to arrive")
    body_timeout_s: float = Field(default=60.0, gt=0, description="For the body to arrive")
    keep_alive_timeout_s: float = Field(default=5.0, gt=0, description="For the next request on a connection")
    max_num_waiting: int | None = Field(
        default=2048, ge=0, description="Requests that may wait for their first step; more get 429. null: any number"
    )
    kept_requests: int = Field(
        default=1000, ge=0, description="Requests that can be explained after their end (/v1/explain)"
    )
    request_timeout_s: float | None = Field(default=None, gt=0, description="For the whole response; null: no limit")
    drain_timeout_s: float = Field(
        default=30.0, ge=0, description="For requests under way to finish once the server is told to end"
    )
    unhealthy_after_s: float = Field(
        default=300.0, gt=0, description="For one step; while one takes longer, /health and /ready are 503"
    )
    cors: CORSSection = CORSSection()
    tls: TLSSection | None = None
    restart: RestartSection = RestartSection()
    log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    access_log: bool = Field(default=True, description="Log a line per response")

    @field_validator("served_model_name", "api_keys", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("served_model_name")
    @classmethod
    def _no_empty_name(cls, names: list[str]) -> list[str]:
        if not all(name.strip() for name in names):
            raise ValueError("a name is empty: give names that requests can send as `model`, or leave the option out")
        return names

    @field_validator("api_keys")
    @classmethod
    def _no_placeholder(cls, keys: list[SecretStr]) -> list[SecretStr]:
        if any(key.get_secret_value() in ("", SECRET) for key in keys):
            raise ValueError("a key is empty, or what a manifest writes in place of one: give the keys again")
        return keys

    @field_validator("routes", mode="before")
    @classmethod
    def _with_defaults(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        named = {
            key: {"name": key, **item} if isinstance(item, Mapping) and "name" not in item else item
            for key, item in value.items()
        }
        return {name: name for name in _default_routes() if name not in named} | named


def _default_routes() -> tuple[str, ...]:
    """Names of the routes that installed packages give as default; none where no package does."""
    with contextlib.suppress(ConfigError):
        return tuple(_installed_default("server.routes"))
    return ()


class PoolingSection(Section):
    """What requests with `PoolingParams` may ask for: a pooler for each task."""

    embed: ComponentSection | None = Field(
        default=ComponentSection(),
        description="One vector per prompt; auto: as the checkpoint's files say, else the last state; null: refuse",
    )
    normalize: bool | None = Field(
        default=None,
        description="Whether embeddings get length 1 where a request does not say; null: as the checkpoint's files "
        "say, else yes",
    )
    token_embed: ComponentSection | None = Field(
        default=ComponentSection(), description="A vector per token; null: refuse it"
    )
    classify: ComponentSection | None = Field(
        default=ComponentSection(), description="Scores of labels; auto: where the checkpoint has any; null: refuse it"
    )
    token_classify: ComponentSection | None = Field(
        default=ComponentSection(), description="Scores of labels per token, likewise; null: refuse it"
    )


class EngineConfig(Section):
    """The whole configuration of an engine. Every section has defaults."""

    model: ModelSection = Field(default_factory=ModelSection)
    cache: CacheSection = CacheSection()
    device: str = Field(
        default=AUTO, min_length=1, description="Device type as torch names it; auto: an accelerator if any"
    )
    executor: ExecutorSection = ExecutorSection()
    attention: ComponentSection = ComponentSection()
    scheduler: SchedulerSection = SchedulerSection()
    speculative: SpeculativeSection | None = None
    lora: LoRASection = LoRASection()
    pooling: PoolingSection = PoolingSection()
    reproducibility: Literal["default", "strict"] = Field(
        default="default",
        description="strict: a request's tokens do not depend on what else is in the batch, nor on speculation",
    )
    dialect: ComponentSection | None = Field(
        default=ComponentSection(),
        description="How the model writes reasoning and tool calls; auto: by the signs of its chat template; null: "
        "refuse chats",
    )
    grammar: GrammarSection | None = Field(
        default=GrammarSection(),
        description="Structured outputs; auto: what reads the model's tokenizer; null: refuse requests that want them",
    )
    weight_transport: NamedSection | None = Field(
        default=None, description="How new weights of a running engine arrive; null: the weights are not updated"
    )
    kv_connector: KVConnectorSection | None = Field(
        default=None, description="Where KV blocks are kept besides the device; null: nowhere"
    )
    logits_processors: dict[Label, NamedSection] = Field(default_factory=dict)
    telemetry: list[NamedSection] = Field(default_factory=list)
    experiments: dict[Label, ExperimentSection] = Field(
        default_factory=dict, description="Live traffic, split between arms that `dovetail ab live` compares"
    )
    server: ServerSection | None = None
    lock: str | None = Field(
        default=None,
        min_length=1,
        description="Lock file (`dovetail lock`): an engine starts only where parts and models are those of the lock",
    )

    @field_validator("logits_processors", mode="before")
    @classmethod
    def _named_by_key(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            key: {"name": key, **item} if isinstance(item, Mapping) else key if item is None else item
            for key, item in value.items()
        }


@dataclass(frozen=True)
class Place:
    """A place in the tree where a section stands."""

    path: tuple[str, ...]
    """"*" stands for any key of a mapping or any index of a list."""
    section: type[Section] | type[ComponentSection]
    kind: str | None = None
    """Plugin kind, where the section is a component."""
    shorthand: str | None = None
    """The key that a plain string sets."""
    nullable: bool = False


PLACES: tuple[Place, ...] = (
    Place((), EngineConfig),
    Place(("model",), ModelSection, shorthand="path"),
    Place(("model", "family"), ComponentSection, "model_family", "name"),
    Place(("model", "weight_format"), ComponentSection, "weight_format", "name"),
    Place(("model", "source"), ComponentSection, "model_source", "name"),
    Place(("model", "quantization"), ComponentSection, "quantization", "name", nullable=True),
    Place(("model", "operators"), ComponentSection, "operators", "name", nullable=True),
    Place(("cache",), CacheSection),
    Place(("executor",), ExecutorSection, "executor", "name"),
    Place(("attention",), ComponentSection, "attention_backend", "name"),
    Place(("scheduler",), SchedulerSection, "scheduler", "name"),
    Place(("speculative",), SpeculativeSection, nullable=True),
    Place(("speculative", "drafters", "*"), DrafterSection, "draft_worker", "name"),
    Place(("speculative", "drafters", "*", "attention"), ComponentSection, "attention_backend", "name", nullable=True),
    Place(("speculative", "acceptance"), ComponentSection, "acceptance_rule", "name"),
    Place(("lora",), LoRASection),
    Place(("pooling",), PoolingSection),
    *(Place(("pooling", task), ComponentSection, "pooler", "name", nullable=True) for task in TASKS),
    Place(("dialect",), ComponentSection, "dialect", "name", nullable=True),
    Place(("grammar",), GrammarSection, "grammar", "name", nullable=True),
    Place(("weight_transport",), NamedSection, "weight_transport", "name", nullable=True),
    Place(("kv_connector",), KVConnectorSection, "kv_connector", "name", nullable=True),
    Place(("logits_processors", "*"), NamedSection, "logits_processor", "name"),
    Place(("telemetry", "*"), NamedSection, "telemetry_sink", "name"),
    Place(("experiments", "*"), ExperimentSection),
    Place(("experiments", "*", "arms", "*"), ArmSection),
    Place(("server",), ServerSection, nullable=True),
    Place(("server", "router"), ComponentSection, "router", "name"),
    Place(("server", "routes", "*"), NamedSection, "route", "name", nullable=True),
    Place(("server", "cors"), CORSSection),
    Place(("server", "tls"), TLSSection, nullable=True),
    Place(("server", "restart"), RestartSection),
)
"""Every section of the tree: layers, resolution and the JSON Schema walk this one list."""


def place_at(path: tuple[str, ...]) -> Place | None:
    """The section that stands at `path`, or None for a single value or a free mapping."""
    for place in PLACES:
        if len(place.path) == len(path) and all(p in ("*", q) for p, q in zip(place.path, path, strict=True)):
            return place
    return None


def shown(path: tuple[str, ...], value: Any) -> Any:
    """A value as messages may show it."""
    return SECRET if path[:2] == ("server", "api_keys") else value


def is_label(name: str) -> bool:
    """Whether the config may give this name to something."""
    return re.search(_LABEL, name) is not None


def known_keys(section: type[Section] | type[ComponentSection]) -> Mapping[str, Any]:
    """The keys that a section declares itself."""
    return section.model_fields
