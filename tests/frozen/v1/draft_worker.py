"""What followed the last token before is the guess for what follows it now."""

from collections.abc import Sequence

import numpy as np

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftBatch, DraftCapabilities, DraftWorker


class Options(PluginOptions):
    max_distance: int = 64


class Frozen(DraftWorker):
    contract = (1, 0)
    Options = Options
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [self._guess(request.token_ids, request.max_drafts) for request in batch.requests]

    def _guess(self, tokens: np.ndarray, most: int) -> Draft | None:
        near = tokens[-self.options.max_distance :]
        found = np.flatnonzero(near[:-1] == near[-1])
        if most == 0 or len(found) == 0:
            return None
        return Draft(near[found[-1] + 1 :][:most].tolist())
