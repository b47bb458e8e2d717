import numpy as np
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.speculation import Draft
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class LengthCapabilities:
    reads_confidence: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthNeed:
    num_tokens: int
    gives_confidence: bool
    trees: bool


@dataclass(frozen=True, kw_only=True)
class DrafterFacts:
    num_tokens: int
    stateless: bool = False
    keeps_layers: bool = False
    trees: bool = False
    reads_late: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthSetup:
    drafters: Mapping[str, DrafterFacts]
    others: Mapping[str, DrafterFacts] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DraftQuestion:
    drafter: str
    seq_ids: Sequence[int]
    most: np.ndarray
    known_tokens: Callable[[int], np.ndarray]
    num_requests: int
    behind: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class OtherDraft:
    seq_id: int
    drafter: str
    num_drafts: int


@dataclass(frozen=True, kw_only=True)
class OfferedDrafts:
    seq_ids: Sequence[int]
    drafters: Sequence[str]
    drafts: Sequence[Draft]
    num_known: Sequence[int]
    num_requests: int
    others: Sequence[OtherDraft] = ()


@dataclass(frozen=True, kw_only=True)
class DraftRound:
    seq_id: int
    drafter: str
    drafted: int
    accepted: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class DrafterCall:
    drafter: str
    seq_ids: Sequence[int]
    asked: Sequence[int]
    given: Sequence[int | None]
    seconds: float | None
    num_late: int = 0
    late_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    num_requests: int
    num_drafts: int
    num_other_drafts: int
    seconds: float | None
    rounds: Sequence[DraftRound] = ()
    calls: Sequence[DrafterCall] = ()


class DraftLength(Plugin):
    capabilities: ClassVar[LengthCapabilities] = LengthCapabilities()
    def __init__(self, options: PluginOptions, setup: LengthSetup): ...
    options: PluginOptions
    setup: LengthSetup
    @abstractmethod
    def ask(self, question: DraftQuestion) -> Sequence[int] | np.ndarray: ...
    @abstractmethod
    def keep(self, offered: OfferedDrafts) -> Sequence[int] | np.ndarray: ...


class AdaptiveDraftLength(DraftLength):
    @abstractmethod
    def observe(self, report: StepReport) -> None: ...
    @abstractmethod
    def idle_drafters(self, num_requests: int) -> Collection[str]: ...
    @abstractmethod
    def forget(self, seq_ids: Collection[int]) -> None: ...
