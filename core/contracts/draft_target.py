"""Drafters that use more of the target than its last states: what it finds likely after every row that it computed, and
some of its layers with its own keys and values. And what weight updates ask of drafters.

The abilities are classes to derive from, as those in `dovetail.contracts.speculation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.contracts.speculation import DraftWorker, SpeculationNeed

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class TopTokens:
    """What the target finds most likely after M rows of one request.

    A step without drafts gives one row, that of the last known token. A step that verified drafts gives a row for the
    last known token and one for every draft token, whether it was accepted or not. Rows of prompts but the last are
    left out: the target computes no logits there.
    """

    follows: np.ndarray
    """int32 [M]: the token that each row follows: its input."""
    parents: np.ndarray
    """int32 [M]: index of the row that comes before each row on its path, -1 for the last known token of a step.
    Parents come before children, and steps in order, so the last -1 is that of the newest step. What was verified may
    be less than the drafter proposed, or a draft that a grammar put in its place."""
    ids: np.ndarray
    """int32 [M, k]: the target's most likely tokens after each row, best first, by its logits before temperature,
    penalties and masks."""


class ReadsTopTokens(DraftWorker):
    """A drafter that reads `DraftRequest.top_tokens`: for tables of what follows what (token recycling), for windows
    that the target itself fills (lookahead decoding), or to calibrate guesses.

    The host keeps the rows of steps after which it does not call the drafter, of the latest 64 of them, and hands them
    over with the next call.
    """

    @classmethod
    @abstractmethod
    def num_top_tokens(cls, options: Any) -> int:
        """Returns how many tokens of each row the drafter reads, from 1 to the size of the vocabulary: k of
        `TopTokens.ids`. `options` is an instance of `cls.Options`."""


class TargetPasses(ABC):
    """Passes over some of the target's layers, with the target's own KV pages."""

    @abstractmethod
    def run(
        self, seq_ids: Sequence[int], starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray, skipped: Set[int]
    ) -> torch.Tensor:
        """Runs the target without its decoder layers `skipped` (numbers from 0 on).

        Request seq_ids[r] has counts[r] >= 1 query tokens at positions starts[r] .. starts[r] + counts[r] - 1;
        `token_ids` has them flat, in order of requests. Each sees all positions before starts[r] and the query tokens
        of its request up to itself. The layers that run write keys and values there; the target's next step computes
        the known tokens and the drafts that it verifies in all layers, and so overwrites them. Of a `DraftRequest` only
        positions from `len(token_ids) - 1` on may be written, below `len(token_ids) + max_drafts - 1`; a position
        between that and the first one of the pass must have been written since the last `propose` began. Call it from
        `propose` only, for requests of that batch that want drafts. Integers, [R] and [sum of counts].

        Returns:
            [sum of counts, hidden_size]: the output of the final norm, ready for `DraftSetup.compute_logits`. Valid
            until the next call.

        Raises:
            PluginError: for positions that the target has computed, or that the drafter has no slots for.
        """


class RunsTarget(DraftWorker):
    """A drafter that guesses with some of the target's own layers: LayerSkip, SWIFT and other self-speculation.

    The host sets `DraftSetup.target`, and refuses the drafter where the target's family leaves out no layers
    (`ModelCapabilities.skips_layers`).

    Such a drafter leaves `DraftCapabilities.tensor_parallel` at 1: other ranks take no part in drafting.
    """


class UpdatesWeights(DraftWorker):
    """A drafter that read weights of its own, which can be replaced while it is loaded (the drafter's share of a weight
    update). The host calls it between steps. A model of `LoadsModel` is the host's to update: it needs none of this."""

    @abstractmethod
    def expected_weights(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of each tensor that the drafter has, by its name in the drafter's files. The host refuses
        updates with other names or shapes, and those that lack some unless they are partial."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], partial: bool = False) -> None:
        """Replaces weights by (name, tensor) pairs of `expected_weights`: all, or with `partial` some. Tensors are on
        the CPU, in any floating dtype; do not keep them. Afterwards the drafter drafts as a new one with these weights
        does. Addresses in captured graphs stay valid. After an error all weights are loaded again before it drafts."""


class NamesWeights(DraftWorker):
    """A drafter that names the weights of its own, so that their memory can be given back while it sleeps. The host
    names a model of `LoadsModel` itself. Weights that nobody names stay in memory."""

    @abstractmethod
    def own_weights(self) -> Iterable[torch.Tensor | torch.nn.Module]:
        """Returns the tensors, and the modules whose tensors are meant. The host copies their content, gives their
        memory back and later fills it again; they stay the same objects, and `propose` is not called meanwhile."""


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """Parts of the target that a drafter calls."""

    embedding: bool = False
    """`DraftSetup.embed`."""
    output: bool = False
    """`DraftSetup.compute_logits`."""

    def __bool__(self) -> bool:
        return self.embedding or self.output


class CallsTarget(DraftWorker):
    """A drafter that calls `DraftSetup.embed` or `compute_logits`, and drafts for targets on any number of ranks: it
    sets `DraftCapabilities.tensor_parallel` to None.

    Where tensor-parallel ranks share these parts, or another pipeline stage holds them, the host reads whole copies of
    those that the drafter names, on the rank that drafts alone. Weight updates and wake-ups renew them. A part that is
    not named raises `PluginError` there.
    """

    @classmethod
    @abstractmethod
    def target_parts(cls, options: Any, need: SpeculationNeed) -> TargetParts:
        """Returns the parts that the drafter calls with these options, an instance of `cls.Options`, also when it is
        created. Called after `check`."""


class CopiesTarget(DraftWorker):
    """A drafter that keeps a copy of some of the target's weights, such as rows of its unembedding."""

    @abstractmethod
    def target_changed(self) -> None:
        """The target's weights were replaced: makes the copy again. Called between steps."""
