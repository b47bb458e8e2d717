"""How an engine came to its weights, so that others can be brought to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from dovetail.contracts.regions import KV_CACHE, WEIGHTS
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.regions import Regions
from dovetail.engine.remote.messages import WeightChange
from dovetail.engine.sleeping import Sleeping
from dovetail.engine.weights.updates import WeightUpdates

logger = logging.getLogger(__name__)

MAX_CHANGES = 256
"""More partial updates in a row are not kept: an engine that lacks them is not brought to these weights."""


class WeightHistory:
    """The last change of all weights (a whole update, or the checkpoint that was read again) and the partial ones
    since, which bring a checkpoint's weights to the present ones. It keeps what was asked, not the tensors: the
    transport reads them again.

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
        # One that brings the weights of a drafter alone is whole too, and replaces nothing of the model's.
        is_of_model = not self._is_partial and any(drafter is None for _, drafter in self._buckets)
        change = WeightChange(report=report, is_partial=self._is_partial, buckets=self._buckets)
        self._note(change, replaces_all=is_of_model)
        return report

    def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """See `Sleeping.wake_up`."""
        are_discarded = all(one.level == 2 for one in self._regions.statuses if one.name != KV_CACHE)
        self._sleeping.wake_up(tags, new_weights=new_weights, for_update=for_update)
        if new_weights:
            change = WeightChange(report=self._updates.report, reads_checkpoint=True)
            self._note(change, replaces_all=are_discarded and tags is None)

    def repeat(self, change: Any) -> WeightsReport:
        """Changes the weights as those of another engine were changed, in one go, so that several clients may ask for
        it: an engine that has weights of this version or a later one keeps them. An update that is under way ends.
        `change`: a `WeightChange` as it travels. Raises what the engine raises."""
        wanted = msgspec.convert(change, WeightChange)
        if self._updates.report.version < wanted.report.version:
            self._updates.abort_weight_update()
            if wanted.reads_checkpoint:
                self._read_checkpoint(wanted.report.version)
            else:
                self._update(wanted)
        return self._updates.report

    def _update(self, change: WeightChange) -> None:
        if level := self._regions.level(WEIGHTS):
            self._sleeping.wake_up(for_update=level == 2)
        self._updates.init_weight_transfer_engine({})
        self.start_weight_update(weight_version=change.report.version, partial=change.is_partial)
        for update_info, drafter in change.buckets:
            self.update_weights(update_info, drafter=drafter)
        self.finish_weight_update()

    def _read_checkpoint(self, version: int) -> None:
        level = self._regions.level(WEIGHTS)
        if level == 1:
            self._sleeping.wake_up()
        if level != 2:
            self._sleeping.sleep(2)
        self._sleeping.wake_up(new_weights=True)
        if self._updates.report.version < version:
            self._updates.note_read_as(version)
        self._note(WeightChange(report=self._updates.report, reads_checkpoint=True), replaces_all=True)

    def _note(self, change: WeightChange, *, replaces_all: bool) -> None:
        if replaces_all:
            self.changes, self._is_whole = [], True
        if len(self.changes) == MAX_CHANGES:
            logger.warning(
                "more than %d partial updates came in a row: a replica that starts again is not brought to these"
                " weights, and takes no requests until all weights are updated",
                MAX_CHANGES,
            )
            self.changes, self._is_whole = [], False
        if self._is_whole:
            self.changes.append(change)
        self._changed()
