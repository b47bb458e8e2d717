"""Drafters that use more of the target than its last states: what it finds likely after every row that it computed.

The abilities are classes to derive from, as those in `dovetail.contracts.speculation`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.contracts.speculation import DraftWorker

if TYPE_CHECKING:
    import numpy as np


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
