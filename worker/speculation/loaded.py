"""What the worker needs of speculation while there is a model and no KV cache yet, and the answers where nobody
speculates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch

from dovetail.config.resolved import ResolvedConfig, ResolvedSpeculation
from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.errors import RequestError
from dovetail.contracts.kv import KVLayout, LayerCache
from dovetail.contracts.model import CausalLM
from dovetail.nn.context import BuildContext
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.draft_tokenizers import DraftTokenizers
from dovetail.worker.input_batch import InputBatch
from dovetail.worker.kv_storage import KVStorage
from dovetail.worker.speculation.layer_states import LayerStates, layer_states
from dovetail.worker.weight_update.targets import UpdateTarget

if TYPE_CHECKING:
    from dovetail.worker.largest_step import JudgedRows
    from dovetail.worker.speculation.speculation import Speculation
    from dovetail.worker.speculation.target_copy import TargetCopy


def load_speculation(
    config: ResolvedConfig,
    plugins: LoadedPlugins,
    model: CausalLM,
    context: BuildContext,
    tokenizers: DraftTokenizers,
    *,
    answers: bool,
) -> LoadedSpeculation:
    """What speculation loads with a model. `answers`: whether this rank drafts and judges."""
    if config.speculation is None:
        return NothingLoaded()
    if not context.is_last_stage:
        return DraftedElsewhere(config.speculation, layer_states(config.speculation, context))
    from dovetail.worker.speculation.loaded_drafters import LoadedDrafters  # most starts do without

    return LoadedDrafters(config, config.speculation, plugins, model, context, tokenizers, answers=answers)


class LoadedSpeculation(ABC):
    """What speculation has loaded with a model, before there is a KV cache."""

    max_query_len: int
    """Most query tokens of a sequence whose prompt is computed: its last known token, and its drafts."""
    hidden_layers: tuple[int, ...]
    """States between the target's layers that this rank computes for drafters."""
    num_earlier_states: int = 0
    """How many of them earlier pipeline stages send to this rank."""
    extra_caches: Mapping[str, tuple[LayerCache, ...]]
    """By drafter, what each of its own attention layers caches on this rank."""

    copy: TargetCopy | None = None
    """Whole copies of parts of the target that drafters call; None where this rank has none."""

    @abstractmethod
    def largest_rows(self, device: torch.device) -> Sequence[JudgedRows]:
        """What the largest step has to judge. Takes the memory that drafts take until they are judged."""

    @abstractmethod
    def update_target(self, drafter: str) -> UpdateTarget | None:
        """What an update of a drafter's weights writes to; None on ranks that draft nothing. Raises `RequestError` for
        a drafter whose weights cannot be replaced."""

    asleep: Set[str] = frozenset()
    """Drafters whose weights sleep. Set by who lets them."""

    @abstractmethod
    def weights(self, drafter: str) -> Iterable[torch.Tensor | torch.nn.Module]:
        """The weights of a drafter's own on this rank, as far as it names them."""

    @abstractmethod
    def target_changed(self) -> None:
        """The target's weights were replaced."""

    @abstractmethod
    def refresh(self) -> None:
        """Drafters that slept when the target's weights were replaced, and are awake, hear of it. The target has its
        weights."""

    @abstractmethod
    def start(
        self, layout: KVLayout, storage: KVStorage, batch: InputBatch, backends: Mapping[int, AttentionBackend]
    ) -> Speculation | None:
        """Over a KV cache, in place of one that was there before. None where nobody speculates. `backends`: those of
        the target's layers, by KV group."""


class NothingLoaded(LoadedSpeculation):
    """Nobody speculates."""

    max_query_len = 1
    hidden_layers: tuple[int, ...] = ()
    extra_caches: Mapping[str, tuple[LayerCache, ...]] = {}

    def largest_rows(self, device: torch.device) -> Sequence[JudgedRows]:
        """None."""
        return []

    def update_target(self, drafter: str) -> None:
        """Refused: there is no drafter."""
        raise RequestError(f"there is no drafter {drafter!r}: the config names none (speculative.drafters)")

    def weights(self, drafter: str) -> Iterable[torch.Tensor | torch.nn.Module]:
        """None."""
        return ()

    def target_changed(self) -> None:
        """Nobody needs to know."""

    def refresh(self) -> None:
        """Nobody needs to know."""

    def start(
        self, layout: KVLayout, storage: KVStorage, batch: InputBatch, backends: Mapping[int, AttentionBackend]
    ) -> None:
        """Nothing to start."""


class DraftedElsewhere(NothingLoaded):
    """The last pipeline stage speculates; this one computes its drafts (`StepPlan.draft_tokens`)."""

    def __init__(self, section: ResolvedSpeculation, states: LayerStates):
        """`states`: what this rank passes on for the drafters."""
        self._drafters = frozenset(section.drafters)
        self.hidden_layers = states.own
        self.num_earlier_states = states.num_earlier
        self.max_query_len = 1 + max(drafter.num_tokens for drafter in section.drafters.values())

    def update_target(self, drafter: str) -> None:
        """Nothing is held here. Raises `RequestError` for a drafter that the config does not have."""
        if drafter not in self._drafters:
            raise unknown_drafter(drafter, self._drafters)


def unknown_drafter(drafter: str, known: Iterable[str]) -> RequestError:
    """What is raised for a drafter's name that the config does not have."""
    return RequestError(f"there is no drafter {drafter!r}: the config has {', '.join(sorted(known))}")
