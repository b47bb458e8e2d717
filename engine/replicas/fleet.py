"""The replicas of one client: who of them runs, and which are in the state that all have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from dovetail.contracts.errors import DovetailError, WorkerError
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.remote.answer_watch import HEALTH_S
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.remote.messages import WeightChange
from dovetail.engine.replicas.asking import Answers, Do, answered, answers_of, ask, begin
from dovetail.engine.replicas.replica import EngineEvents, Replica
from dovetail.engine.replicas.state import EngineState, bring_to, difference, state_of

logger = logging.getLogger(__name__)

_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0
"""Between attempts to bring a replica to the state of the others: each wait is twice the one before."""
_TRIES = 5
"""Times that a replica is brought to a state which others have left meanwhile, asked by another client."""
_MISSED = "it did not answer while the others changed"
Value = TypeVar("Value")


class FleetListener(Protocol):
    """Hears which replicas take requests."""

    async def replica_admitted(self, replica: Replica) -> None:
        """It is in the state of the others. Raises `DovetailError` where it cannot take requests yet."""

    def replica_lost(self, replica: Replica) -> None:
        """Its engine ended. It must return at once."""

    def replica_silent(self, replica: Replica, error: WorkerError | None) -> None:
        """It is there and does not answer; None: it answers again. It must return at once."""


class Fleet:
    """What is asked of all replicas is done by all or by none. A replica that ends or falls silent meanwhile is left
    out: it is brought to the state of the others before it takes requests again."""

    def __init__(self, addresses: Sequence[str]):
        """Opens clients of the engines at `addresses`, which need not run yet."""
        self.replicas = [Replica(index) for index in range(len(addresses))]
        for replica, address in zip(self.replicas, addresses, strict=True):
            replica.engine = RemoteEngine.open(address, EngineEvents(replica, self))
        self._listener: FleetListener | None = None
        """None until `start`."""
        self._state: EngineState | None = None
        """What all had in common when one of them was last asked."""
        self.control = asyncio.Lock()
        """Held while all change, and while one is brought to the state of the others."""
        self._changed = asyncio.Event()
        """Set, and replaced, when an attempt to admit a replica may end otherwise than the one before."""
        self._admissions: dict[Replica, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    async def wait_until_known(self, timeout_s: float | None) -> None:
        """Returns once an engine answers, and each of the others answers too, is not there, or had some seconds. Raises
        `WorkerError` where none answers within `timeout_s` seconds."""
        waits = [asyncio.ensure_future(replica.engine.wait_until_running()) for replica in self.replicas]
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not done:
            raise WorkerError(f"none of {len(waits)} engines answers within {timeout_s} seconds")
        settled = asyncio.gather(*(replica.engine.wait_until_settled() for replica in self.replicas))
        with suppress(TimeoutError):
            await asyncio.wait_for(settled, HEALTH_S)

    async def start(self, listener: FleetListener) -> None:
        """Admits those that run. The one with the newest weights, and of these the one that has run longest, says what
        all have in common: another may have started again, and not been brought there yet."""
        self._listener = listener
        running = [replica for replica in self.replicas if replica.engine.is_running]
        found = (await ask(running, RemoteEngine.weights)).done
        order = sorted(found, key=lambda replica: (-found[replica].version, replica.engine.origin.started))
        for replica in order:
            if not await self._try_to_admit(replica):
                logger.error("%s takes no requests: %s", replica.name, replica.barrier)
        for replica in self.replicas:
            if replica.engine.is_running and not replica.is_admitted:
                self._start_admission(replica)

    @property
    def admitted(self) -> list[Replica]:
        """Those that run in the state of the others, and answer."""
        return [replica for replica in self.replicas if replica.is_admitted and replica.is_reachable]

    def troubles(self) -> str:
        """For messages: why each replica that takes no requests does not."""
        return "; ".join(f"{replica.name}: {replica.trouble}" for replica in self.replicas if replica.trouble)

    async def read(self, question: Do) -> Answers:
        """What those that take requests answer, where nothing is changed. Raises the first one's error where some
        refuse, or none answers; those that fall silent meanwhile are left out."""
        answers = await ask(self.some(), question)
        if answers.failed or not answers.done:
            raise answers.error()
        return answers

    async def on_all(self, do: Do) -> Answers:
        """Has all that take requests do something, or none: where it fails on some, all get the state back that they
        had, and the error is raised with the replica's name. It goes on where the caller gives up."""
        return await self.to_the_end(self._on_all(do))

    async def on_all_at_length(self, do: Do) -> Answers:
        """As `on_all`, for a pause, which may take until others are asked something: it is sent in one piece with the
        rest, and nothing waits for its answers. Where it fails on some, the pause alone is taken back."""
        return await self.to_the_end(self._on_all_at_length(do))

    async def ask_to_change(self, replicas: Iterable[Replica], do: Do) -> Answers:
        """Asks those of `replicas` that answer; who falls silent meanwhile takes no requests before it is in the state
        of the others. For those that hold `control`. At least one answer, refusal or loss is among what it returns;
        raises `WorkerError` where there is none to ask."""
        replicas = list(replicas)
        asked = [replica for replica in replicas if replica.is_reachable]
        if not asked:
            raise WorkerError(f"no replica that takes part answers: {self.troubles()}")
        self._note_missing(replicas)
        answers = await ask(asked, do)
        self._bar_silent(answers)
        return answers

    def to_update(self) -> list[Replica]:
        """Those whose weights are updated: all that answer, those too that wait for an update to be admitted. Raises
        `WorkerError` where there is none."""
        found = [replica for replica in self.replicas if replica.is_reachable and not replica.is_foreign]
        if not found:
            raise WorkerError(f"no replica can be updated: {self.troubles()}")
        return found

    async def note_weights(self, report: WeightsReport, replicas: Sequence[Replica]) -> None:
        """These have new weights; all others take no requests before they have them. For those that hold `control`."""
        for replica in self.replicas:
            if replica not in replicas and replica.is_admitted:
                self.bar(replica, f"it has not got the weights of version {report.version}")
        self._state = await answered(replicas[0], state_of(replicas[0].engine))
        self.look_again()

    @property
    def known(self) -> Replica:
        """One of which an engine answered once. There is one after `wait_until_known`."""
        return next(replica for replica in self.replicas if replica.engine.is_known)

    async def close(self) -> None:
        """Ends the clients of all replicas."""
        tasks = [*self._admissions.values(), *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.engine.close() for replica in self.replicas))

    # What replicas report.

    def replica_came(self, replica: Replica) -> None:
        """See `ReplicaListener`."""
        replica.silent.clear()
        if self._listener is not None:
            self._start_admission(replica)

    def replica_lost(self, replica: Replica) -> None:
        """See `ReplicaListener`."""
        replica.barrier = "it is not in the state of the others yet"
        replica.silent.clear()
        if self._listener is not None:
            what = "requests go to the others" if self.admitted else "no replica takes requests"
            logger.error("%s is down: %s", replica.name, what)
            self._listener.replica_lost(replica)

    def replica_updated(self, replica: Replica) -> None:
        """See `ReplicaListener`. Another client may have given it what it lacked."""
        self.look_again()

    def replica_silent(self, replica: Replica, error: WorkerError | None) -> None:
        """See `ReplicaListener`."""
        if error is not None:
            if not replica.silent.is_set():
                logger.error("%s does not answer: %s", replica.name, error)
            replica.silent.set()
        else:
            replica.silent.clear()
            logger.info("%s answers again", replica.name)
        if self._listener is not None:
            self._listener.replica_silent(replica, error)
            if error is None and replica.barrier:
                self._start_admission(replica)

    # How one is brought to the state of the others.

    def bar(self, replica: Replica, why: str) -> None:
        """It takes no requests until it is in the state of the others."""
        replica.barrier = why
        logger.error("%s takes no requests: %s", replica.name, why)
        if replica.is_reachable:
            self._start_admission(replica)

    def look_again(self) -> None:
        """Attempts to admit replicas may end otherwise now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _start_admission(self, replica: Replica) -> None:
        known = self._admissions.get(replica)
        if known is None or known.done():
            self._admissions[replica] = asyncio.create_task(self._admit(replica))
        else:
            self.look_again()

    async def _admit(self, replica: Replica) -> None:
        """Until it takes requests, or does not answer any more."""
        said, wait_s = replica.barrier, _RETRY_S
        while replica.is_reachable and replica.barrier:
            changed = self._changed
            if await self._try_to_admit(replica):
                logger.info("%s takes requests again", replica.name)
                return
            if replica.barrier != said:
                said = replica.barrier
                logger.error("%s takes no requests: %s", replica.name, said)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    async def _try_to_admit(self, replica: Replica) -> bool:
        assert self._listener is not None
        async with self.control:
            try:
                why = await answered(replica, self._bring(replica))
                replica.barrier = why
                if not why:
                    await answered(replica, self._listener.replica_admitted(replica))
            except DovetailError as error:
                replica.barrier = str(error)
        return not replica.barrier

    async def _bring(self, replica: Replica) -> str:
        """Brings it to the state of the others, or of the last of them. Returns why it cannot have it."""
        engine = replica.engine
        other = next((other for other in self.admitted if other is not replica), None)
        replica.is_foreign = False
        if other is not None:
            if why := difference(engine, other.engine):
                replica.is_foreign = True
                return why
            self._state = await answered(other, state_of(other.engine))
        if self._state is None:
            self._state = await state_of(engine)
        if other is None:
            self._state = self._with_newest_weights(self._state)
            return await self._bring_to(engine, self._state)
        for _ in range(_TRIES):
            if why := await self._bring_to(engine, self._state):
                return why
            before, self._state = self._state, await answered(other, state_of(other.engine))
            if before.is_like(self._state):
                return ""
        return "the others were changed again and again while it was brought to their state"

    async def _bring_to(self, engine: RemoteEngine, state: EngineState) -> str:
        await self._bring_weights(engine, state.weights)
        return await bring_to(engine, state)

    def _with_newest_weights(self, state: EngineState) -> EngineState:
        """Another client may have updated the weights of the others since this one asked for their state."""
        reports = [changes[-1].report for replica in self.replicas if (changes := replica.engine.weight_changes)]
        return replace(state, weights=max([state.weights, *reports], key=lambda report: report.version))

    async def _bring_weights(self, engine: RemoteEngine, wanted: WeightsReport) -> None:
        """As far as some engine has said how it came to these weights. Raises what the engine raises, `WorkerError`
        where other tensors come than came to the others."""
        if await engine.weights() == wanted:
            return
        for changes in [replica.engine.weight_changes for replica in self.replicas]:
            if changes and changes[-1].report == wanted:
                for change in changes:
                    await _repeat(engine, change)
                return

    # How all change.

    async def to_the_end(self, call: Awaitable[Value]) -> Value:
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _on_all(self, do: Do) -> Answers:
        async with self.control:
            before = await self._observe()
            return await self._settle(await ask(self._all(), do), before)

    async def _on_all_at_length(self, do: Do) -> Answers:
        async with self.control:
            before = await self._observe()
            asked = begin(self._all(), do)
            await asyncio.sleep(0)  # it is sent: who asks for the state now gets the one behind it
        answers = await answers_of(asked)
        async with self.control:
            if answers.failed or not answers.done:
                # What else all did meanwhile stays: only the pause is taken back.
                before = replace(await self._observe(), is_paused=before.is_paused)
            return await self._settle(answers, before)

    async def _settle(self, answers: Answers, before: EngineState) -> Answers:
        self._bar_silent(answers)
        if answers.done and not answers.failed:
            self._state = await self._observe()
            self.look_again()
            return answers
        for replica in (*answers.done, *answers.failed):
            if replica.is_reachable:
                await self._take_back(replica, before)
        raise answers.error()

    async def _take_back(self, replica: Replica, before: EngineState) -> None:
        try:
            why = await answered(replica, bring_to(replica.engine, before))
        except DovetailError as error:
            why = str(error)
        if why:
            self.bar(replica, f"what failed on another replica could not be undone here: {why}")

    def _bar_silent(self, answers: Answers) -> None:
        for replica in answers.gone:
            if replica.engine.is_running:
                self.bar(replica, _MISSED)

    async def _observe(self) -> EngineState:
        """The state that all have in common."""
        for replica in self.some():
            with suppress(WorkerError):
                return await answered(replica, state_of(replica.engine))
        raise WorkerError(f"no replica answers: {self.troubles()}")

    def some(self) -> list[Replica]:
        """Those that take requests. Raises `WorkerError` where there is none."""
        if not (admitted := self.admitted):
            raise WorkerError(f"none of {len(self.replicas)} replicas takes requests: {self.troubles()}")
        return admitted

    def _all(self) -> list[Replica]:
        """As `some`; one that is silent misses what all are asked now."""
        self._note_missing(self.replicas)
        return self.some()

    def _note_missing(self, replicas: Iterable[Replica]) -> None:
        """Those that are silent miss what is asked now, and take no requests before they have caught up."""
        for replica in replicas:
            if replica.is_admitted and not replica.is_reachable:
                replica.barrier = _MISSED


async def _repeat(engine: RemoteEngine, change: WeightChange) -> None:
    wanted, found = change.report, await engine.repeat_weight_change(change)
    if found.version == wanted.version and found != wanted:
        raise WorkerError(
            f"the tensors of weight version {found.version} are not those that the others received"
            f" ({found.checksum} and {wanted.checksum}): send all replicas the weights again"
        )
