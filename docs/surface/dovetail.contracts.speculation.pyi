import numpy as np, torch
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.draft_stages import DraftStage, StageAbilities
from dovetail.contracts.draft_target import TargetPasses, TopTokens
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
    reads_prediction: bool = False
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
    skips_layers: bool = False
    model: DraftModelInfo | None = None
    has_tokenizer_json: bool = False
    stages: Mapping[str, StageAbilities] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AcceptanceCapabilities:
    lossless: bool = False
    trees: bool = False
    sampling: bool = False
    synthetic: bool = False


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
    tokenizer_json: str | None = None
    vocab_size: int = 0


class DraftPages(ABC):
    @abstractmethod
    def plan(
        self,
        seq_ids: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        tree_masks: Mapping[int, np.ndarray] | None = None,
    ) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
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
    num_layers: int
    distributions: Callable[[torch.Tensor, Sequence[SamplingParams]], torch.Tensor]
    draw: Callable[[torch.Tensor, np.ndarray], torch.Tensor]
    wants_confidence: bool = False
    tokenizer_json: str | None = None
    stages: Mapping[str, DraftStage] = field(default_factory=dict)
    target: TargetPasses | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSetup(DraftSetup):
    create_context: Callable[[], ModelContext]
    pages: DraftPages
    model: DraftModel | None = None


@dataclass(frozen=True)
class Draft:
    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    probs: torch.Tensor | None = None
    confidence: Sequence[float] | None = None
    from_prediction: bool = False
    @property
    def is_tree(self) -> bool: ...
    @property
    def parent_indices(self) -> list[int]: ...
    @property
    def depths(self) -> list[int]: ...


@dataclass(frozen=True)
class DraftRequest:
    seq_id: int
    token_ids: np.ndarray
    num_prompt_tokens: int
    max_drafts: int
    sampling: SamplingParams
    hidden_rows: np.ndarray
    uniforms: np.ndarray
    forced: Sequence[int] = ()
    first_position: int = 0
    top_tokens: TopTokens | None = None
    prediction: np.ndarray | None = None


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
    @abstractmethod
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]: ...
    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None: ...
    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None: ...


class TreesByOption(DraftWorker):
    @classmethod
    @abstractmethod
    def proposes_trees(cls, options: Any) -> bool: ...


class LearnsFromRequests(DraftWorker):
    @abstractmethod
    def forget_finished(self) -> None: ...


class ReadsTokenizer(DraftWorker):
    @classmethod
    @abstractmethod
    def reads_tokenizer(cls, options: Any) -> bool: ...


class ReadsHiddenLayers(DraftWorker):
    @classmethod
    @abstractmethod
    def hidden_layers(cls, options: Any, need: SpeculationNeed) -> Sequence[int]: ...


class BuildsLayers(DraftWorker):
    setup: LayerSetup
    @classmethod
    @abstractmethod
    def quantization(cls, options: Any) -> str | Mapping[str, Any] | None: ...


class LoadsModel(DraftWorker):
    setup: LayerSetup
    @classmethod
    @abstractmethod
    def model_section(cls, options: Any) -> Mapping[str, Any] | None: ...


class KeepsLayers(DraftWorker):
    setup: LayerSetup
    @classmethod
    @abstractmethod
    def caches(cls, options: Any, need: SpeculationNeed) -> Sequence[KVSpec]: ...
    @abstractmethod
    def attention_layers(self) -> Sequence[AttentionModule]: ...


class TargetView(ABC):
    @abstractmethod
    def probs(self) -> torch.Tensor: ...
    @abstractmethod
    def tokens(self) -> Sequence[int]: ...
    @abstractmethod
    def joined(self, views: Sequence[TargetView]) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    draft: Draft
    target: TargetView
    sampling: SamplingParams
    accept_uniforms: np.ndarray
    recover_uniforms: np.ndarray

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
