"""A fixed number of drafts."""

from collections.abc import Sequence

import numpy as np

from dovetail.contracts.draft_length import DraftLength, DraftQuestion, OfferedDrafts
from dovetail.contracts.plugin import PluginOptions


class Options(PluginOptions):
    most: int = 2


class Frozen(DraftLength):
    contract = (1, 0)
    Options = Options

    def ask(self, question: DraftQuestion) -> np.ndarray:
        return np.minimum(question.most, self.options.most)

    def keep(self, offered: OfferedDrafts) -> Sequence[int]:
        return [min(len(draft.token_ids), self.options.most) for draft in offered.drafts]
