from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from dovetail.config.files import FileContent
from dovetail.config.layers import Dropped, Origin
from dovetail.config.manifest import RecordedPlugin
from dovetail.config.resolved import ResolvedCache, ResolvedGrammar, ResolvedKVConnector, ResolvedLoRA, ResolvedModel, ResolvedPooling, ResolvedSpeculation
from dovetail.config.schema import EngineConfig
from dovetail.config.tree import KeyPath
from dovetail.contracts.dialect import Dialect
from dovetail.contracts.draft_target import TargetParts
from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import DovetailError
from dovetail.contracts.executor import ExecutorNeed
from dovetail.contracts.plugin import Environment, Plugin, PluginOptions
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.contracts.telemetry import ExperimentDescription
from dovetail.registry.registry import Registry
from dovetail.worker.estimate import StageEstimate
from pathlib import Path
from rich.console import Console
from typing import Any

__all__ = [
    "Component",
    "Decision",
    "Explanation",
    "LayeredConfig",
    "MemoryEstimate",
    "RankEstimate",
    "ResolvedConfig",
    "ResolvedServer",
    "StepMessages",
    "VERSION",
    "Value",
    "as_data",
    "create_class",
    "create_console",
    "create_dialect",
    "detect_environment",
    "exit_code",
    "explain",
    "load_config",
    "print_error",
    "print_warning",
    "read_file",
    "resolve_server",
    "takes_config",
    "takes_config_option",
    "takes_model_or_config",
    "write_manifest",
]

@dataclass(frozen=True)
class Component:
    kind: str
    name: str
    reference: str
    distribution: str | None = None
    version: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    key: str
    asked: Any
    got: Any
    reason: str
    candidates: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Explanation:
    values: tuple[Value, ...]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    resolved: ResolvedConfig | None
    estimate: MemoryEstimate | None
    refusal: DovetailError | None
    refused_requests: tuple[str, ...]
    remarks: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[RankEstimate, ...] = ()
    @property
    def largest_step(self) -> tuple[int, int] | None: ...


@dataclass(frozen=True)
class LayeredConfig:
    config: EngineConfig
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)
    dropped: tuple[Dropped, ...] = ()
    recorded: tuple[RecordedPlugin, ...] = ()
    def origin(self, key: str | KeyPath) -> str: ...
    def base_dir(self, key: str | KeyPath) -> Path: ...
    def tree(self) -> dict[str, Any]: ...
    def asked(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class MemoryEstimate:
    num_parameters: int
    checkpoint_bytes: int
    weight_bytes: int
    copied_bytes: int
    served_layers: str | None
    kv_bytes_per_token: int
    draft_bytes_per_token: int
    draft_weight_bytes: int
    kv_bytes: int | None
    kv_tokens: int | None
    max_concurrency: float | None
    adapter_bytes: int = 0
    stages: tuple[StageEstimate, ...] = ()
    target_copy_bytes: int = 0


@dataclass(frozen=True)
class RankEstimate:
    rank: int
    stage: int
    tensor_rank: int
    answers: bool
    node: str
    device: str
    first_layer: int
    num_layers: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int | None
    transport: str | None
    messages: tuple[StepMessages, ...]


@dataclass(frozen=True)
class ResolvedConfig:
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
    speculation: ResolvedSpeculation | None
    worker_memory_bytes: int
    reproducibility: str
    dialect: Component | None
    grammar: ResolvedGrammar | None
    logits_processors: Mapping[str, Component]
    telemetry: tuple[Component, ...]
    experiments: tuple[ExperimentDescription, ...]
    decisions: tuple[Decision, ...]
    plugin_hash: str
    values: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    lora: ResolvedLoRA | None = None
    pooling: ResolvedPooling = field(default_factory=ResolvedPooling)
    weight_transport: Component | None = None
    stage_layers: tuple[int, ...] = ()
    kv_connector: ResolvedKVConnector | None = None
    num_replicas: int = 1
    @property
    def num_stages(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    def layers_of_stage(self, stage: int) -> range | None: ...
    @property
    def copied_parts(self) -> TargetParts: ...
    def executor_need(self) -> ExecutorNeed: ...
    def quantization_need(self) -> QuantizationNeed: ...
    @property
    def is_strict(self) -> bool: ...
    def components(self) -> list[Component]: ...
    def components_by_path(self) -> dict[str, Component]: ...


@dataclass(frozen=True)
class ResolvedServer:
    section: Mapping[str, Any] = field(repr=False)
    routes: Mapping[str, Component]
    router: Component | None = None


@dataclass(frozen=True)
class StepMessages:
    kind: str
    count: int
    bytes_per_token: int | None = 0
    bytes_per_request: int | None = 0
    def num_bytes(self, num_tokens: int, num_requests: int) -> int | None: ...

VERSION = ...

@dataclass(frozen=True)
class Value:
    key: str
    value: Any
    origin: str
    overrides: tuple[tuple[str, Any], ...] = ()

def as_data(explanation: Explanation) -> dict[str, Any]: ...
def create_class(component: Component) -> tuple[type[Plugin], PluginOptions]: ...
def create_console(*, stderr: bool = False) -> Console: ...
def create_dialect(facts: EngineFacts) -> Dialect | None: ...
def detect_environment(device_type: str | None = None) -> Environment: ...
def exit_code(error: DovetailError) -> int: ...
def explain(
    layered: LayeredConfig,
    registry: Registry | None = None,
    environment: Environment | None = None,
) -> Explanation: ...
def load_config(
    config: str | Path | Mapping[str, Any] | EngineConfig | LayeredConfig | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    base_dir: Path | None = None,
    speculative: str | None = None,
) -> LayeredConfig: ...
def print_error(error: DovetailError, *, show_traceback: bool = False) -> int: ...
def print_warning(message: str) -> None: ...
def read_file(path: Path, kind: str = 'config file') -> FileContent: ...
def resolve_server(layered: LayeredConfig, registry: Registry | None = None) -> ResolvedServer: ...
def takes_config(command: Callable[..., None]) -> Callable[..., None]: ...
def takes_config_option(command: Callable[..., None]) -> Callable[..., None]: ...
def takes_model_or_config(command: Callable[..., None]) -> Callable[..., None]: ...
def write_manifest(
    resolved: ResolvedConfig,
    path: str | Path,
    origins: Mapping[str, str] | None = None,
) -> None: ...
