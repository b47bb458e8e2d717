"""How an engine came to its weights, so that others can be brought to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from dovetail.contracts.regions import WEIGHTS
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.regions import Regions
from dovetail.engine.remote.messages import WeightChange
from dovetail.engine.sleeping import Sleeping
from dovetail.engine.weights.updates import WeightUpdates

MAX_CHANGES = 256
"""More partial updates in a row are not kept: an engine that lacks them is not brought to these weights."""


class WeightHistory:
    """The last whole update and the partial ones since, which bring a checkpoint's weights to the present ones. It
    keeps what was asked, not the tensors: the transport reads them again.

    Its methods are those of the engine that change weights: they do what the engine's do, and note it.
    """

    def __init__(self, updates: WeightUpdates, sleeping: Sleeping, regions: Regions, changed: Callable[[], None]):
        """`changed` is called once weights have changed, and `changes` with them."""
        self.changes: list[WeightChange] = []
        self._updates = updates
        self._sleeping = sleeping
        self._regions = regions
        self._changed = changed
        self._is_whole = True
        """Whether `changes` lead to the present weights."""
        self._is_partial = False
        self._buckets: list[tuple[dict[str, Any], str | None]] = []
        """Of the update under way."""

    def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """See `WeightUpdates.start_weight_update`."""
        version = self._updates.start_weight_update(
            is_checkpoint_format, weight_version=weight_version, partial=partial
        )
        self._is_partial, self._buckets = bool(partial), []
        return version

    def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """See `WeightUpdates.update_weights`."""
        self._updates.update_weights(update_info, drafter=drafter)
        self._buckets.append((dict(update_info), drafter))

    def finish_weight_update(self) -> WeightsReport:
        """See `WeightUpdates.finish_weight_update`."""
        report = self._updates.finish_weight_update()
        self._note(WeightChange(report=report, is_partial=self._is_partial, buckets=self._buckets))
        return report

    def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """See `Sleeping.wake_up`."""
        self._sleeping.wake_up(tags, new_weights=new_weights, for_update=for_update)
        if new_weights:
            self._note(WeightChange(report=self._updates.report, reads_checkpoint=True))

    def repeat(self, change: Any) -> WeightsReport:
        """Changes the weights as those of another engine were changed, in one go, so that several clients may ask for
        it: an engine that has weights of this version or a later one keeps them. An update that is under way is ended.
        `change`: a `WeightChange` as it travels. Raises what the engine raises."""
        wanted = msgspec.convert(change, WeightChange)
        if self._updates.report.version < wanted.report.version:
            self._updates.abort_weight_update()
            if wanted.reads_checkpoint:
                self._read_checkpoint()
            else:
                self._update(wanted)
        return self._updates.report

    def _update(self, change: WeightChange) -> None:
        self._updates.init_weight_transfer_engine({})
        self.start_weight_update(weight_version=change.report.version, partial=change.is_partial)
        for update_info, drafter in change.buckets:
            self.update_weights(update_info, drafter=drafter)
        self.finish_weight_update()

    def _read_checkpoint(self) -> None:
        level = self._regions.level(WEIGHTS)
        if level == 1:
            self._sleeping.wake_up()
        if level != 2:
            self._sleeping.sleep(2)
        self.wake_up(new_weights=True)

    def _note(self, change: WeightChange) -> None:
        # One that brings the weights of a drafter alone is whole too, and replaces nothing of the model's.
        if not change.is_partial and any(drafter is None for _, drafter in change.buckets):
            self.changes, self._is_whole = [], True
        if len(self.changes) == MAX_CHANGES:
            self.changes, self._is_whole = [], False
        if self._is_whole:
            self.changes.append(change)
        self._changed()
