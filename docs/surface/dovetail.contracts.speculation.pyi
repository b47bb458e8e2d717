import numpy as np, torch
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import CausalLM, ModelContext, ModelSize
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.sampling import SamplingParams
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class DraftCapabilities:
    tensor_parallel: int | None = 1
    trees: bool = False
    probabilities: bool = False
    needs_hidden_states: bool = False
    confidence: bool = False
    stateless: bool = False
    kv_cache: bool = False
    reads_next_token: bool = False


@dataclass(frozen=True)
class DraftModelInfo:
    config: Mapping[str, Any]
    size: ModelSize
    dtype: str
    vocabulary_difference: str | None = None


@dataclass(frozen=True)
class SpeculationNeed:
    device_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    tensor_parallel: int
    num_tokens: int
    num_layers: int = 0
    kv_dtype: str = ''
    gives_hidden_layers: bool = False
    model: DraftModelInfo | None = None


@dataclass(frozen=True, kw_only=True)
class AcceptanceCapabilities:
    lossless: bool = False
    trees: bool = False
    sampling: bool = False


@dataclass(frozen=True)
class AcceptanceNeed:
    device_type: str
    vocab_size: int
    num_tokens: int
    trees: bool = False
    lossless: bool = False


@dataclass(frozen=True)
class DraftModel:
    module: CausalLM
    layers: Sequence[AttentionModule]
    max_model_len: int


class DraftPages:
    def plan(
        self,
        keys: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        tree_masks: Mapping[int, np.ndarray] | None = None,
    ) -> np.ndarray: ...


@dataclass(frozen=True)
class DraftSetup:
    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_num_seqs: int
    num_tokens: int
    device: torch.device
    dtype: torch.dtype
    embed: Callable[[torch.Tensor], torch.Tensor]
    compute_logits: Callable[[torch.Tensor], torch.Tensor]
    num_layers: int = 0
    model: DraftModel | None = None
    pages: DraftPages = field(default_factory=DraftPages)
    create_context: Callable[[], ModelContext] = _without_host
    distributions: Callable[[torch.Tensor, Sequence[SamplingParams]], torch.Tensor] = _without_host
    draw: Callable[[torch.Tensor, np.ndarray], torch.Tensor] = _without_host
    wants_confidence: bool = False


@dataclass(frozen=True)
class Draft:
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    probs: torch.Tensor | None = None
    confidence: Sequence[float] | None = None
    @property
    def is_tree(self) -> bool: ...
    @property
    def parent_indices(self) -> list[int]: ...
    @property
    def depths(self) -> list[int]: ...


@dataclass(frozen=True)
class DraftRequest:
    key: int
    token_ids: np.ndarray
    num_prompt_tokens: int
    max_drafts: int
    sampling: SamplingParams
    hidden_rows: np.ndarray
    uniforms: np.ndarray
    first_position: int = 0


@dataclass(frozen=True)
class DraftBatch:
    requests: Sequence[DraftRequest]
    hidden_states: torch.Tensor | None
    layer_states: torch.Tensor | None = None


class DraftWorker(Plugin):
    capabilities: ClassVar[DraftCapabilities] = DraftCapabilities()
    def __init__(self, options: PluginOptions, setup: DraftSetup): ...
    options: PluginOptions
    setup: DraftSetup
    @classmethod
    def proposes_trees(cls, options: PluginOptions) -> bool: ...
    @classmethod
    def model_section(cls, options: Any) -> Mapping[str, Any] | None: ...
    @classmethod
    def quantization(cls, options: Any) -> str | Mapping[str, Any] | None: ...
    @classmethod
    def caches(cls, options: Any, need: SpeculationNeed) -> Sequence[KVSpec]: ...
    @classmethod
    def hidden_layers(cls, options: Any, need: SpeculationNeed) -> Sequence[int]: ...
    def attention_layers(self) -> Sequence[AttentionModule]: ...
    @abstractmethod
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]: ...
    def on_verified(self, key: int, accepted: Sequence[int], num_drafted: int) -> None: ...
    def on_finished(self, key: int, token_ids: Sequence[int]) -> None: ...
    def forget_finished(self) -> None: ...


@dataclass(frozen=True)
class VerifyRequest:
    draft: Draft
    compute_target: Callable[[], torch.Tensor]
    draw_target: Callable[[], Sequence[int]]
    sampling: SamplingParams
    accept_uniforms: np.ndarray
    recover_uniforms: np.ndarray
    rows: range = range(0)
    compute_rows: Callable[[np.ndarray], torch.Tensor] | None = None
    @property
    def target(self) -> torch.Tensor: ...
    @property
    def target_tokens(self) -> Sequence[int]: ...

def targets_of(requests: Sequence[VerifyRequest]) -> torch.Tensor: ...

@dataclass(frozen=True)
class Verdict:
    accepted: Sequence[int]
    next_token_id: int


class AcceptanceRule(Plugin):
    capabilities: ClassVar[AcceptanceCapabilities] = AcceptanceCapabilities()
    def __init__(self, options: PluginOptions): ...
    options: PluginOptions
    def use_operators(self, operators: Operators) -> None: ...
    @abstractmethod
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]: ...
