"""Weight updates of all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.replicas.asking import Answers, Do, ask
from dovetail.engine.replicas.fleet import Fleet
from dovetail.engine.replicas.replica import Replica


class ReplicatedUpdates:
    """Updates that all replicas take part in which answer, those too that wait for new weights to be admitted, unless
    the update is partial: it changes weights that they do not have. One that is gone, or silent, for any part of it
    takes part no more, and receives the same tensors later, before it takes requests."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self._replicas: dict[Replica, float] = {}
        """Those that take part in the update that is under way, and when their engines started: another one that was
        started meanwhile knows nothing of it."""
        self._version = 0
        """Of that update."""

    async def init(self, init_info: Mapping[str, Any]) -> None:
        """Connects the transport of each."""
        await self._fleet.to_the_end(self._ask(self._fleet.to_update(), _init(init_info)))

    async def start(self, is_checkpoint_format: bool, weight_version: int | None, partial: bool) -> int:
        """See `EngineClient.start_weight_update`. All get the same version."""
        return await self._fleet.to_the_end(self._start(is_checkpoint_format, weight_version, partial))

    async def receive(self, update_info: Mapping[str, Any], drafter: str | None) -> None:
        """See `EngineClient.update_weights`. Where some receive the bucket and others refuse it, the update is ended on
        all."""
        await self._fleet.to_the_end(self._receive(update_info, drafter))

    async def finish(self) -> WeightsReport:
        """See `EngineClient.finish_weight_update`. A replica that fails where others do not takes no requests before it
        has the weights of the others; the error names it."""
        return await self._fleet.to_the_end(self._finish())

    async def abort(self) -> None:
        """See `EngineClient.abort_weight_update`."""
        self._replicas = {}
        await self._fleet.to_the_end(self._ask(self._fleet.to_update(), RemoteEngine.abort_weight_update))

    async def _start(self, is_checkpoint_format: bool, weight_version: int | None, partial: bool) -> int:
        replicas = self._fleet.to_update()
        if weight_version is None:
            reports = (await self._ask(replicas, RemoteEngine.weights)).done.values()
            weight_version = 1 + max(report.version for report in reports)
        if partial:
            replicas = [replica for replica in replicas if replica.is_admitted] or replicas
        async with self._fleet.control:
            start = _start(is_checkpoint_format, weight_version, partial)
            answers = await self._fleet.ask_to_change(replicas, start)
            if answers.failed or not answers.done:
                await ask(answers.done, RemoteEngine.abort_weight_update)
                raise answers.error()
            self._replicas, self._version = _with_starts(answers.done), weight_version
        return weight_version

    async def _receive(self, update_info: Mapping[str, Any], drafter: str | None) -> None:
        async with self._fleet.control:
            receive = _receive(update_info, drafter)
            answers = await self._fleet.ask_to_change(self._taking_part(), receive)
            if answers.failed and answers.done:
                self._replicas = {}
                await ask(self._fleet.to_update(), RemoteEngine.abort_weight_update)
            if answers.failed or not answers.done:
                raise answers.error()
            if self._replicas:
                self._replicas = _with_starts(answers.done)

    async def _finish(self) -> WeightsReport:
        async with self._fleet.control:
            answers = await self._fleet.ask_to_change(self._taking_part(), RemoteEngine.finish_weight_update)
            if not answers.done:
                if answers.gone:
                    self._replicas = {}
                raise answers.error()
            # What those have that took requests is right: another may have begun from other weights.
            admitted = [found for replica, found in answers.done.items() if replica.is_admitted]
            report: WeightsReport = (admitted or [answers.first])[0]
            self._replicas = {}
            same = [replica for replica, found in answers.done.items() if found == report]
            await self._fleet.note_weights(report, same)
        if answers.failed:
            raise answers.error()
        return report

    async def _ask(self, replicas: list[Replica], do: Do) -> Answers:
        async with self._fleet.control:
            answers = await self._fleet.ask_to_change(replicas, do)
            if answers.failed or not answers.done:
                raise answers.error()
            return answers

    def _taking_part(self) -> list[Replica]:
        """Where no update is under way, an engine says so. One that another client finished is over."""
        if any(replica.weight_version >= self._version for replica in self._replicas):
            self._replicas = {}
        if not self._replicas:
            return self._fleet.to_update()
        return [replica for replica, start in self._replicas.items() if replica.engine.origin.started == start]


def _with_starts(replicas: Iterable[Replica]) -> dict[Replica, float]:
    return {replica: replica.engine.origin.started for replica in replicas}


def _init(init_info: Mapping[str, Any]) -> Do:
    return lambda engine: engine.init_weight_transfer_engine(init_info)


def _start(is_checkpoint_format: bool, weight_version: int, partial: bool) -> Do:
    return lambda engine: engine.start_weight_update(
        is_checkpoint_format, weight_version=weight_version, partial=partial
    )


def _receive(update_info: Mapping[str, Any], drafter: str | None) -> Do:
    return lambda engine: engine.update_weights(update_info, drafter=drafter)
