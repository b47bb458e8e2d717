"""Weight updates of all replicas, kept so that one that comes back gets them too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.remote.client import RemoteEngine


@dataclass
class _Update:
    """One update."""

    is_partial: bool
    buckets: list[tuple[Mapping[str, Any], str | None]] = field(default_factory=list)
    """`update_info` and the drafter's label of each."""
    reads_checkpoint: bool = False
    """No buckets came: the checkpoint was read again, behind a sleep that discarded the weights."""
    report: WeightsReport | None = None
    """None until it is finished."""


class WeightJournal:
    """The last whole update and the partial ones since, which bring a checkpoint's weights to the present ones. It
    keeps what was asked, not the tensors: the transport reads them again."""

    def __init__(self) -> None:
        self._updates: list[_Update] = []
        self._under_way: _Update | None = None

    def start(self, is_partial: bool) -> None:
        """An update began."""
        self._under_way = _Update(is_partial)

    def receive(self, update_info: Mapping[str, Any], drafter: str | None) -> None:
        """All that take part have this bucket."""
        if self._under_way is not None:
            self._under_way.buckets.append((update_info, drafter))

    def finish(self, report: WeightsReport) -> None:
        """It was written."""
        update, self._under_way = self._under_way, None
        if update is None:
            return
        update.report = report
        # One that brings the weights of a drafter alone is whole too, and replaces nothing of the model's.
        replaces = not update.is_partial and any(drafter is None for _, drafter in update.buckets)
        self._updates = [update] if replaces else [*self._updates, update]

    def read_again(self, report: WeightsReport) -> None:
        """All read the checkpoint again. What came before is kept: versions of weights only rise."""
        self._updates.append(_Update(is_partial=False, reads_checkpoint=True, report=report))

    def abort(self) -> None:
        """It was given up."""
        self._under_way = None

    def leads_to(self, report: WeightsReport) -> bool:
        """Whether `replay` brings these weights."""
        return bool(self._updates) and self._updates[-1].report == report

    async def replay(self, engine: RemoteEngine) -> None:
        """Gives an engine the weights of the last update. Raises what the engine raises, `WorkerError` where other
        tensors come than came to the others."""
        await engine.abort_weight_update()
        await engine.init_weight_transfer_engine({})
        present = (await engine.weights()).version
        for update in self._updates:
            assert update.report is not None
            if update.report.version <= present:
                continue
            found = await _repeat(engine, update, update.report.version)
            if found != update.report:
                raise WorkerError(
                    f"the tensors of weight version {found.version} are not those that the others received"
                    f" ({found.checksum} and {update.report.checksum}): send all replicas the weights again"
                )


async def _repeat(engine: RemoteEngine, update: _Update, version: int) -> WeightsReport:
    if update.reads_checkpoint:
        await engine.sleep(2)
        await engine.wake_up(new_weights=True)
        return await engine.weights()
    await engine.start_weight_update(weight_version=version, partial=update.is_partial)
    for update_info, drafter in update.buckets:
        await engine.update_weights(update_info, drafter=drafter)
    return await engine.finish_weight_update()
