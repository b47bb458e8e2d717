"""What a configuration came to: every choice made, nothing left to decide. It pickles, and is all that
a worker is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.draft_target import TargetParts
from dovetail.contracts.executor import ExecutorNeed
from dovetail.contracts.grammar import GrammarLimits
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import ModelSize
from dovetail.contracts.pooling import PoolerNeed
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.contracts.sampling import RAW_LOGPROBS
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.contracts.speculation import DraftCapabilities
from dovetail.contracts.telemetry import ExperimentDescription
from dovetail.contracts.weights import ModelFiles


@dataclass(frozen=True)
class Component:
    """A chosen plugin, named so that any process can import the same one."""

    kind: str
    name: str
    """What the config says: an entry point's name, "dist:name", "package.module:Class" or "./file.py:Class"."""
    reference: str
    """What to import: "package.module:Class" or "/absolute/file.py:Class"."""
    distribution: str | None = None
    """Distribution that brought the entry point; None for a direct reference."""
    version: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Validated by the plugin's own `Options`; plain data."""


@dataclass(frozen=True)
class Decision:
    """A value that came out other than it was asked for, or that `auto` was asked to choose."""

    key: str
    asked: Any
    got: Any
    reason: str
    candidates: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Each candidate with its reasons against; no reasons for those that would do."""


@dataclass(frozen=True)
class ResolvedModel:
    """The model: files, config and sizes."""

    files: ModelFiles
    hf_config: Mapping[str, Any]
    """Keys of Hugging Face's config.json, overrides applied, "generation_config" among them."""
    dtype: str
    max_model_len: int
    size: ModelSize
    """As its family says."""
    eos_token_ids: tuple[int, ...]
    tokenizer: str | None
    """Directory of a tokenizer other than the model's own."""
    tokenizer_mode: str
    """"auto", "slow", "mistral" or "none"."""
    seed: int
    max_logprobs: int
    packed_formats: frozenset[str] = frozenset()
    """Formats of the checkpoint's packed tensors, where the choice of a quantization method asked for them."""
    packed_cache_gib: float = 0.0
    """Room on disk for packed weights."""
    logprobs_mode: str = RAW_LOGPROBS
    """Of requests that name none."""
    max_completions: int = 1024
    """Most completions, or beams, of one request."""
    chat_template: str | None = None
    """Jinja source, in place of the checkpoint's own templates."""

    @property
    def vocab_size(self) -> int:
        """Logits of a token."""
        return self.size.vocab_size


@dataclass(frozen=True)
class ResolvedCache:
    """The KV memory."""

    block_size: int
    dtype: str
    prefix_caching: bool
    memory_bytes: int | None
    """KV memory per rank where the config gives it; None: sized from what the worker reports."""
    memory_fraction: float
    num_blocks: int | None
    swap_bytes: int


@dataclass(frozen=True)
class ResolvedDraftModel:
    """A model of a drafter's own."""

    files: ModelFiles
    hf_config: Mapping[str, Any]
    dtype: str
    size: ModelSize
    """As its family says."""
    max_model_len: int
    """Its own positions; the target's may be fewer."""
    source: Component
    weight_format: Component
    family: Component
    quantization: Component | None
    packed_formats: frozenset[str]

    def quantization_need(self, device_type: str) -> QuantizationNeed:
        """What the quantization method is asked for."""
        return QuantizationNeed(device_type, self.dtype, self.packed_formats)

    def components_by_path(self, path: str) -> dict[str, Component]:
        """Every chosen component. `path`: the section of the model, which the drafter's options stand for."""
        chosen = {
            f"{path}.source": self.source,
            f"{path}.weight_format": self.weight_format,
            f"{path}.family": self.family,
        }
        return chosen if self.quantization is None else {**chosen, f"{path}.quantization": self.quantization}


@dataclass(frozen=True)
class ResolvedDrafter:
    """One configured drafter."""

    name: str
    component: Component
    num_tokens: int
    length: Component
    """How many drafts are asked for and verified."""
    attention: Component | None = None
    """Backend of its own layers; None where it has none."""
    kv_dtype: str = ""
    """dtype of their pages."""
    model: ResolvedDraftModel | None = None
    quantization: Component | None = None
    """How layers that it builds by itself hold their weights."""
    hidden_layers: tuple[int, ...] = ()
    """States between the target's layers that it is handed."""
    reads_next_token: bool = False
    trees: bool = False
    """Whether it proposes trees."""
    caches: tuple[KVSpec, ...] = ()
    """What its layers cache, as it announced."""
    reads_tokenizer: bool = False
    """Whether it is handed the target's tokenizer, and that of its own model."""
    abilities: DraftCapabilities = field(default_factory=DraftCapabilities)
    """What it can do and needs with these options, its stages included."""
    stages: tuple[str, ...] = ()
    """Labels of other drafters that it asks."""
    stages_keep_layers: bool = False
    """Whether one of them has layers of its own."""
    runs_target: bool = False
    """Whether it runs some of the target's layers."""
    target_parts: TargetParts = field(default_factory=TargetParts)
    """Parts of the target that it calls, its stages left out."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the pages of its layers, as far as configs tell."""
        return sum(cache.page_bytes(1) for cache in self.caches)

    @property
    def kv_cache(self) -> bool:
        """Whether its requests' KV blocks hold pages of layers of its own, or of its stages."""
        return self.attention is not None or self.stages_keep_layers

    @property
    def looks_ahead(self) -> bool:
        """Whether it writes to slots of the tokens that it drafts."""
        return self.kv_cache or self.runs_target

    def components_by_path(self) -> dict[str, Component]:
        """Every chosen component, its own first, by its path in the config."""
        path = f"speculative.drafters.{self.name}"
        chosen = {path: self.component, f"{path}.length": self.length}
        if self.attention is not None:
            chosen[f"{path}.attention"] = self.attention
        if self.quantization is not None:
            chosen[f"{path}.quantization"] = self.quantization
        return chosen if self.model is None else chosen | self.model.components_by_path(f"{path}.model")


@dataclass(frozen=True)
class ResolvedSpeculation:
    """Drafters by name, the default one, and the rule."""

    drafters: Mapping[str, ResolvedDrafter]
    default: str | None
    acceptance: Component
    disable_by_batch_size: int | None
    disable_logprobs: bool
    hidden_size: int
    """Of the target."""
    rules: Mapping[str, Component] = field(default_factory=dict)
    """By name, further acceptance rules, for requests that name one."""


@dataclass(frozen=True)
class ResolvedLoRA:
    """Low-rank adapters that requests may name."""

    max_loras: int
    """Slots: adapters that one step can apply."""
    max_rank: int
    max_cpu_loras: int
    """Adapters that each worker keeps in host memory."""
    dtype: str
    """Of the slots: the model's, or a narrower one."""
    modules: tuple[tuple[str, str], ...] = ()
    """Name and folder of those that are loaded at the start."""


@dataclass(frozen=True)
class ResolvedPooling:
    """What requests may have pooled."""

    poolers: Mapping[str, Component] = field(default_factory=dict)
    """By task; a task that is not among them is refused."""
    needs: Mapping[str, PoolerNeed] = field(default_factory=dict)
    """By task, what the pooler is asked for."""
    skips_prefix: frozenset[str] = frozenset()
    """Tasks whose pooler needs the last states alone."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """By task that is refused, why."""
    num_labels: int = 0
    """Labels of the checkpoint's score head, its family's or the host's; 0: it has none."""
    normalizes: bool = True
    """Whether embeddings get length 1 where a request does not say."""


@dataclass(frozen=True)
class ResolvedGrammar:
    """What compiles the grammars of requests."""

    component: Component
    limits: GrammarLimits
    wait_s: float
    """How long a request waits for its grammar at most, whatever the plugin does."""
    read_ahead: bool
    """Whether the vocabulary is read while the engine starts, rather than for the first grammar."""


@dataclass(frozen=True)
class ResolvedKVConnector:
    """Where KV blocks are kept besides the device."""

    component: Component
    load_s: float
    """How long a request waits for blocks at most."""
    queued_bytes: int
    """Most host memory of a rank for blocks that wait to be saved."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with every choice made."""

    model: ResolvedModel
    cache: ResolvedCache
    device_type: str
    tensor_parallel: int
    num_threads: int | None
    enforce_eager: bool
    executor: Component
    attention: Component
    scheduler: Component
    limits: SchedulerLimits
    model_family: Component
    weight_format: Component
    model_source: Component
    quantization: Component | None
    operators: Component | None
    """None: plain torch, the building blocks' own."""
    speculation: ResolvedSpeculation | None
    worker_memory_bytes: int
    """Host memory of the machine that workers run on."""
    reproducibility: str
    """"default" or "strict"."""
    dialect: Component | None
    """How the model writes reasoning and tool calls. Clients create it; workers do not use it. None: chats are
    refused."""
    grammar: ResolvedGrammar | None
    """None: requests with a grammar are refused."""
    logits_processors: Mapping[str, Component]
    telemetry: tuple[Component, ...]
    experiments: tuple[ExperimentDescription, ...]
    """On live traffic."""
    decisions: tuple[Decision, ...]
    plugin_hash: str
    """Hash of the chosen components with their versions; every process compares its own."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The resolved tree as plain data (the sections of the config file), for manifests and hooks."""
    warnings: tuple[str, ...] = ()
    """What is odd and stops nothing: an installed plugin that cannot be loaded, a manifest of other versions."""
    lora: ResolvedLoRA | None = None
    """None: requests with an adapter are refused."""
    pooling: ResolvedPooling = field(default_factory=ResolvedPooling)
    weight_transport: Component | None = None
    """None: the weights are not updated while the engine runs."""
    stage_layers: tuple[int, ...] = ()
    """Decoder layers of each pipeline stage, in their order; empty: one stage has all."""
    kv_connector: ResolvedKVConnector | None = None
    """None: KV blocks are nowhere but in the engine's own memory."""
    num_replicas: int = 1
    """Engines of this config that a server runs."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages that share the layers."""
        return len(self.stage_layers) or 1

    @property
    def num_ranks(self) -> int:
        """Workers, over all stages."""
        return self.tensor_parallel * self.num_stages

    def layers_of_stage(self, stage: int) -> range | None:
        """Decoder layers of one stage, numbered as in the checkpoint; None: all there are."""
        if not self.stage_layers:
            return None
        start = sum(self.stage_layers[:stage])
        return range(start, start + self.stage_layers[stage])

    @property
    def copied_parts(self) -> TargetParts:
        """Parts of the model that drafters call and the rank that drafts does not hold whole: it gets copies. Where the
        output layer is tied to the embedding, the last stage may hold that all the same."""
        parts = [] if self.speculation is None else [one.target_parts for one in self.speculation.drafters.values()]
        return TargetParts(
            embedding=self.num_ranks > 1 and any(part.embedding for part in parts),
            output=self.tensor_parallel > 1 and any(part.output for part in parts),
        )

    def executor_need(self) -> ExecutorNeed:
        """What the executor is asked for, at its creation as at its check."""
        return ExecutorNeed(
            self.device_type,
            self.tensor_parallel,
            self.num_stages,
            enforce_eager=self.enforce_eager,
            max_num_seqs=self.limits.max_num_seqs,
            num_replicas=self.num_replicas,
        )

    def quantization_need(self) -> QuantizationNeed:
        """What the quantization method is asked for, at its creation as at its check."""
        return QuantizationNeed(self.device_type, self.model.dtype, self.model.packed_formats, self.is_strict)

    @property
    def is_strict(self) -> bool:
        """Whether a request's tokens must not depend on what else is in the batch."""
        return self.reproducibility == "strict"

    def components(self) -> list[Component]:
        """Every chosen component, for bootstrap and hashing."""
        return list(self.components_by_path().values())

    def components_by_path(self) -> dict[str, Component]:
        """Every chosen component by its path in the config ("attention", "speculative.drafters.NAME.attention")."""
        chosen = {"executor": self.executor, "attention": self.attention, "scheduler": self.scheduler}
        if self.dialect is not None:
            chosen["dialect"] = self.dialect
        chosen |= {
            "model.family": self.model_family,
            "model.weight_format": self.weight_format,
            "model.source": self.model_source,
        }
        chosen |= {f"logits_processors.{label}": component for label, component in self.logits_processors.items()}
        chosen |= {f"telemetry.{index}": component for index, component in enumerate(self.telemetry)}
        chosen |= {f"pooling.{task}": component for task, component in self.pooling.poolers.items()}
        if self.grammar is not None:
            chosen["grammar"] = self.grammar.component
        if self.kv_connector is not None:
            chosen["kv_connector"] = self.kv_connector.component
        if self.weight_transport is not None:
            chosen["weight_transport"] = self.weight_transport
        if self.quantization is not None:
            chosen["model.quantization"] = self.quantization
        if self.operators is not None:
            chosen["model.operators"] = self.operators
        if self.speculation is not None:
            for drafter in self.speculation.drafters.values():
                chosen |= drafter.components_by_path()
            chosen["speculative.acceptance"] = self.speculation.acceptance
            chosen |= {f"speculative.rules.{name}": rule for name, rule in self.speculation.rules.items()}
        return chosen
