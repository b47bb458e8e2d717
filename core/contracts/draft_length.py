"""Draft length: how many draft tokens a drafter is asked for, and how many of them are verified.

The host creates one instance for all drafters of the config whose `length` names it with the same options, on the rank
that samples. After a step it calls, in this order:

    observe(StepReport)      what the step cost, and what became of the drafts in it (`AdaptiveDraftLength` only)
    ask(DraftQuestion)       once for each drafter whose requests took part
    keep(OfferedDrafts)      if drafts came: how many of each the next step verifies

so one round of one request reads:

    ask(seq_ids=[7], most=[4])                      -> [3]     the drafter is asked for three
    keep(seq_ids=[7], drafts=[Draft([5, 6, 7])])    -> [2]     the first two wait for verification
    observe(rounds=[DraftRound(seq_id=7, drafted=2, accepted=[0])], seconds=0.012, ...)

Answers depend on the options, the setup and these calls alone: no clock, no random numbers, no other state. Where a
call raises or gives an invalid answer, the requests in question go on without their drafters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.needs import compared, informs
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.speculation import Draft

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class LengthCapabilities:
    """What a draft-length policy requires of the drafters that it serves."""

    reads_confidence: bool = False
    """The policy reads `Draft.confidence`, or `Draft.probs` where it is None; drafters that give neither are
    refused."""


def _missed(reads_confidence: bool, gives_confidence: bool) -> bool | None:
    return True if reads_confidence and not gives_confidence else None


@dataclass(frozen=True, kw_only=True)
class LengthNeed:
    """What the config asks of a policy for one drafter; the argument of `check`."""

    num_tokens: int = field(metadata=informs("any policy may ask for fewer"))
    """Most drafts per round that the config allows."""
    gives_confidence: bool = field(
        metadata=compared(
            "reads_confidence",
            _missed,
            "{name} goes by the confidence of drafts, and the drafter says nothing of its confidence: choose another "
            "length.",
        )
    )
    """Whether the drafter gives `Draft.confidence` or `Draft.probs`."""
    trees: bool = field(metadata=informs("a policy answers with a number of nodes, in chains and in trees"))
    """Whether the drafter proposes trees."""


@dataclass(frozen=True, kw_only=True)
class DrafterFacts:
    """What a policy may know of a drafter."""

    num_tokens: int
    """Most drafts per round that the config allows."""
    stateless: bool = False
    """The drafter keeps no state: it is called, and costs time, only where drafts are asked for. Other drafters read
    every position that the target computes, whatever is asked, unless they read late."""
    keeps_layers: bool = False
    """The drafter has attention layers of its own."""
    trees: bool = False
    """The drafter proposes trees."""
    reads_late: bool = False
    """The drafter keeps layers and guesses from tokens alone. It is called only where drafts are asked for, and reads
    first what it has not read of the request (`DraftQuestion.behind`)."""


@dataclass(frozen=True, kw_only=True)
class LengthSetup:
    """What a policy is created with."""

    drafters: Mapping[str, DrafterFacts]
    """The drafters that the policy serves, by their labels in the config."""
    others: Mapping[str, DrafterFacts] = field(default_factory=dict)
    """The engine's drafters that other policies serve, by their labels in the config."""


@dataclass(frozen=True, kw_only=True)
class DraftQuestion:
    """The requests of one drafter that took part in a step, R of them."""

    drafter: str
    seq_ids: Sequence[int]
    """The requests, each once."""
    most: np.ndarray
    """int64 [R]: most draft tokens that each request can use; 0 while its prompt is incomplete or its end is near, and
    right after its prompt where the drafter reads late."""
    known_tokens: Callable[[int], np.ndarray]
    """Returns all known tokens of a request by its seq_id: int32, read-only, valid until `ask` returns. They are made
    when they are asked for."""
    num_requests: int
    """Requests in the whole step, with or without drafters: the expected size of the next step."""
    behind: Sequence[int] = ()
    """[R]: positions of earlier steps that a drafter which reads late would have to read before it drafts; empty for
    other drafters. Where many requests are far behind, the host has them read over several steps, and requests that
    wait get no draft until then."""


@dataclass(frozen=True, kw_only=True)
class OtherDraft:
    """A draft of another policy, which is verified whatever this one answers."""

    seq_id: int
    drafter: str
    num_drafts: int


@dataclass(frozen=True, kw_only=True)
class OfferedDrafts:
    """The D >= 1 drafts that the policy's drafters gave; none is empty or longer than was asked for."""

    seq_ids: Sequence[int]
    drafters: Sequence[str]
    """[D]: the request of each draft."""
    drafts: Sequence[Draft]
    num_known: Sequence[int]
    """[D]: known tokens of each request, which is the position of its first draft token."""
    num_requests: int
    """As in `DraftQuestion`."""
    others: Sequence[OtherDraft] = ()
    """Drafts of other policies that the next step verifies too, as far as they are decided."""


@dataclass(frozen=True, kw_only=True)
class DraftRound:
    """A round: the draft of one request that a step verified."""

    seq_id: int
    drafter: str
    drafted: int
    """Number of verified nodes."""
    accepted: Sequence[int]
    """Indices of the accepted nodes, from the root down."""


@dataclass(frozen=True, kw_only=True)
class DrafterCall:
    """One call of a drafter that the policy serves."""

    drafter: str
    seq_ids: Sequence[int]
    asked: Sequence[int]
    """By request: the longest draft that the drafter was asked for; 0 for requests of which it only read states."""
    given: Sequence[int | None]
    """By request: draft tokens that the drafter gave, before any cut; None where the draft could not be used."""
    seconds: float | None
    """Time of the call; None where it read parts of prompts, or positions of earlier steps that were put off, which is
    not a cost of drafting."""
    num_late: int = 0
    """Positions of earlier steps that a drafter which reads late has read in this call."""
    late_seconds: float | None = None
    """Time of the call, drafts included, where it read such positions."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step cost, and what became of its drafts."""

    num_requests: int
    num_drafts: int
    """Draft tokens of the policy's drafters that the step computed."""
    num_other_drafts: int
    """Draft tokens of all other drafters that the step computed."""
    seconds: float | None
    """Time of the step without its drafters; None where it computed parts of prompts or was not measured."""
    rounds: Sequence[DraftRound] = ()
    """Time of all drafters in the step, `LengthSetup.others` included."""
    calls: Sequence[DrafterCall] = ()
    """Calls of the policy's drafters since the last report."""


class DraftLength(Plugin):
    """Decides how many draft tokens are asked for and verified.

    A request is known by its seq_id. Once it ended, nothing may follow from a seq_id that comes again.

    A policy that is no `AdaptiveDraftLength` answers for each request from its `most` and its draft alone: where drafts
    are drawn, their number decides which tokens a seeded request gets, so other requests and earlier steps must not
    change it. Every policy, where drafts were drawn (`Draft.probs`), keeps or cuts a node without regard to the token
    drawn there and those after it: a cut that depends on the token would change the distribution of the output.
    """

    capabilities: ClassVar[LengthCapabilities] = LengthCapabilities()

    def __init__(self, options: PluginOptions, setup: LengthSetup):
        self.options = options
        self.setup = setup

    @abstractmethod
    def ask(self, question: DraftQuestion) -> Sequence[int] | np.ndarray:
        """Returns [R]: how many draft tokens to ask for, each 0 to `most`. A stateless drafter does not see requests
        with 0. Where all are 0, other drafters may see the step later."""

    @abstractmethod
    def keep(self, offered: OfferedDrafts) -> Sequence[int] | np.ndarray:
        """Returns [D]: how many of the first nodes of each draft to verify, each 0 to its length."""


class AdaptiveDraftLength(DraftLength):
    """A policy that learns from the time of steps and from which draft tokens are accepted.

    Its answers depend on measured times. So the host has no drafts drawn for requests that promise the same tokens
    again (a seed, or `reproducibility: strict`): another number of drawn drafts would give other tokens.
    """

    @abstractmethod
    def observe(self, report: StepReport) -> None:
        """Takes in the report of a step. The host calls it after every step in which the engine has requests, before
        the next `ask`."""

    @abstractmethod
    def idle_drafters(self, num_requests: int) -> Collection[str]:
        """Returns the labels of drafters to disable for new requests at this batch size, since they have only cost time
        for long. The host asks after every step and follows the answer for drafters that keep layers. It still gives
        the drafter to some requests, so that the policy can find out that it pays again."""

    @abstractmethod
    def forget(self, seq_ids: Collection[int]) -> None:
        """These requests ended. A seq_id that was never heard of may come."""
