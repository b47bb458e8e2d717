"""The stages of drafters that ask other drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.config.resolved import ResolvedDrafter
from dovetail.contracts.draft_stages import DraftStage
from dovetail.contracts.errors import PluginError
from dovetail.contracts.speculation import Draft, DraftBatch, DraftRequest, DraftWorker
from dovetail.nn.host_copies import on_device
from dovetail.worker.speculation.target_passes import BatchPasses, proposing


class HostStage(DraftStage):
    """A drafter of the config as the stage of another one, whose batches it shares."""

    def __init__(
        self,
        config: ResolvedDrafter,
        worker: DraftWorker,
        batch_layers: Sequence[int],
        num_top_tokens: int,
        passes: BatchPasses | None,
    ):
        """`batch_layers`: whose states between layers the batches hold. `num_top_tokens`: how many of each row the
        stage reads. `passes`: the stage's over the target."""
        self.name = config.name
        self.capabilities = config.abilities
        self.num_tokens = config.num_tokens
        self._worker = worker
        self._passes = passes
        self._columns = [batch_layers.index(layer) for layer in config.hidden_layers]
        self._num_layers = len(batch_layers)
        self.num_top_tokens = num_top_tokens
        self._batch: DraftBatch | None = None
        self._was_asked = False

    def begin(self, batch: DraftBatch) -> None:
        """The composing drafter is about to propose."""
        self._batch, self._was_asked = batch, False

    def complete(self) -> None:
        """It has proposed: a stage that it did not ask sees the batch now."""
        assert self._batch is not None
        if not self._was_asked and not self.capabilities.stateless:
            self.propose([0] * len(self._batch.requests))

    def end(self) -> None:
        """The batch is over."""
        self._batch = None

    def propose(self, max_drafts: Sequence[int]) -> Sequence[Draft | None]:
        """As `DraftStage.propose`."""
        batch = self._batch
        if batch is None or self._was_asked:
            problem = "outside of the `propose` that it belongs to" if batch is None else "twice for one batch"
            raise PluginError(f"stage {self.name!r} was asked {problem}: ask it once in each `propose`")
        self._was_asked = True
        if len(max_drafts) != len(batch.requests):
            raise PluginError(
                f"stage {self.name!r} was asked for {len(max_drafts)} drafts, and the batch has"
                f" {len(batch.requests)} requests: give one number for each, 0 where no draft is wanted"
            )
        requests = [self._shown(*pair) for pair in zip(batch.requests, max_drafts, strict=True)]
        chosen = [i for i, one in enumerate(requests) if one.max_drafts or not self.capabilities.stateless]
        drafts: list[Draft | None] = [None] * len(requests)
        if chosen:
            shown = self._of(batch, [requests[i] for i in chosen])
            with proposing(self._passes, shown.requests):
                given = list(self._worker.propose(shown))
            if len(given) != len(chosen):
                raise PluginError(f"stage {self.name!r} gave {len(given)} drafts for {len(chosen)} requests")
            for i, draft in zip(chosen, given, strict=True):
                drafts[i] = draft if requests[i].max_drafts else None
        return drafts

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        """As `DraftStage.on_verified`."""
        self._worker.on_verified(seq_id, accepted, num_drafted)

    def _shown(self, request: DraftRequest, wanted: int) -> DraftRequest:
        count = max(0, min(int(wanted), request.max_drafts, self.num_tokens))
        top = request.top_tokens
        if top is not None:
            top = replace(top, ids=top.ids[:, : self.num_top_tokens]) if self.num_top_tokens else None
        return replace(
            request,
            max_drafts=count,
            uniforms=request.uniforms[:count],
            forced=request.forced[:count],
            top_tokens=top,
        )

    def _of(self, batch: DraftBatch, requests: Sequence[DraftRequest]) -> DraftBatch:
        """The batch as the stage is to see it."""
        layers = batch.layer_states if self._columns else None
        if layers is not None and len(self._columns) < self._num_layers:
            index = on_device(np.array(self._columns, dtype=np.int64), layers.device)
            layers = layers.view(len(layers), self._num_layers, -1).index_select(1, index).flatten(1)
        hidden = batch.hidden_states if self.capabilities.needs_hidden_states else None
        return DraftBatch(requests, hidden, layers)
