"""Drafters made of others: a drafter that asks other drafters of the config, its stages, and answers with drafts
of theirs.

The host builds each stage as the drafter that it is: checked, with its weights, KV pages and states. So any drafter can
be a stage, and one that composes needs nothing that others do not get.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.contracts.speculation import Draft, DraftCapabilities, DraftWorker


class DraftStage(ABC):
    """One stage, as the drafter that it belongs to calls it."""

    name: str
    """The stage's label in the config."""
    capabilities: DraftCapabilities
    """With its options: `trees` says whether it proposes any."""
    num_tokens: int
    """Most nodes of its drafts, by its own section of the config."""

    @abstractmethod
    def propose(self, max_drafts: Sequence[int]) -> Sequence[Draft | None]:
        """Returns the stage's draft for each request of the batch that the composing drafter's `propose` is in, in
        order, with at most `max_drafts` nodes each, and no more than the request's own `max_drafts` and `num_tokens`.
        0: no draft is wanted of it.

        At most once in a `propose`, and nowhere else: raises `PluginError`. A stage that is not asked, and is not
        `stateless`, is asked by the host for drafts of 0 nodes, so it sees every state and keeps its pages right.
        Whatever the stage raises is for the composing drafter to let pass.
        """

    @abstractmethod
    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        """Hands on the verdict on a draft that was the stage's, unchanged: see `DraftWorker.on_verified`. The host
        itself calls the stage's `on_finished`."""


class ComposesDrafters(DraftWorker):
    """A drafter with stages (`DraftSetup.stages`).

    It declares what it can do and needs by itself; to the host its capabilities are those of all together, see
    `with_stages`. So it gets the target's states that a stage wants, and its requests' KV blocks hold the pages of its
    stages. It may read no states between the target's layers itself.

    Drafts that were drawn keep the target's distribution only if nothing that was drawn decided whether they are used.
    So of a stage that declares `probabilities` take the draft as it is, whatever it is; ask no other stage after it.
    """

    @classmethod
    @abstractmethod
    def stages(cls, options: Any) -> Sequence[str]:
        """Returns the labels of other drafters of the config, none twice, in an order of the drafter's choice. None of
        them may have stages. Called before `check`, which finds them in `SpeculationNeed.stages`."""


@dataclass(frozen=True)
class StageAbilities:
    """What is known of a stage before it is built."""

    capabilities: DraftCapabilities
    """With its options: `trees` says whether it proposes any."""
    num_tokens: int
    """Most nodes of its drafts."""


def with_stages(own: DraftCapabilities, stages: Iterable[DraftCapabilities]) -> DraftCapabilities:
    """Returns what a drafter and its stages can do and need together. Tensor parallel ranks are left as they are: each
    drafter is asked for itself."""
    every = [own, *stages]
    return replace(
        own,
        trees=any(one.trees for one in every),
        probabilities=any(one.probabilities for one in every),
        needs_hidden_states=any(one.needs_hidden_states for one in every),
        confidence=any(one.confidence for one in every),
        reads_prediction=any(one.reads_prediction for one in every),
        stateless=all(one.stateless for one in every),
        reads_next_token=any(one.reads_next_token for one in every),
    )
