"""Regions of an engine's memory go to sleep and wake up: on every rank, or on none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from dovetail.contracts.errors import RequestError, WorkerError
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.regions import KV_CACHE, WEIGHTS
from dovetail.engine.adapters.served import ServedAdapters
from dovetail.engine.core import EngineCore
from dovetail.engine.exclusive_use import ExclusiveUse, exclusive
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.pausing import Pausing
from dovetail.engine.regions import Regions
from dovetail.engine.weights.held import HeldWeights
from dovetail.engine.workers import Workers


class SleepingEngine(Protocol):
    """What sleeps."""

    @property
    def core(self) -> EngineCore:
        """The step loop."""

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forgets cached prefixes."""


class Sleeping:
    """The sleep of one engine's regions."""

    def __init__(
        self,
        engine: SleepingEngine,
        use: ExclusiveUse,
        regions: Regions,
        workers: Workers,
        pausing: Pausing,
        adapters: ServedAdapters,
        weights: HeldWeights,
    ):
        """Nothing sleeps yet."""
        self.use = use
        self._engine = engine
        self._regions = regions
        self._workers = workers
        self._pausing = pausing
        self._adapters = adapters
        self._weights = weights

    @exclusive
    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """See `LLMEngine.sleep`."""
        names = self._regions.to_sleep(level, tags)
        self._pausing.give_up_memory()
        self._engine.core.settle()
        given_back = _fall_asleep(self._workers, level, names)
        if WEIGHTS in names:
            self._adapters.forget_slots()
        if KV_CACHE in names:
            self._engine.reset_prefix_cache()
        self._regions.note_asleep(names, level)
        return given_back

    @exclusive
    def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """See `LLMEngine.wake_up`."""
        if new_weights and for_update:
            raise RequestError("new_weights reads the checkpoint, and for_update reads nothing: choose one")
        names = self._regions.to_wake(tags, has_content=not for_update)
        levels = {name: self._regions.level(name) for name in names}
        if (new_weights or for_update) and levels.get(WEIGHTS) != 2:
            option = "new_weights" if new_weights else "for_update"
            raise EngineConflict(
                f"{option} is for weights that sleep level 2 discarded, and no such weights would wake up: leave it out"
            )
        _wake(self._workers, levels, new_weights=new_weights, for_update=for_update)
        self._regions.note_awake(names, has_content=not for_update)
        if new_weights:
            self._weights.read_again()


def _fall_asleep(workers: Workers, level: int, names: Sequence[str]) -> int:
    """Returns the bytes that were given back, over all ranks. Raises `CapacityError` where a rank cannot set its
    weights aside; all are awake then."""
    try:
        workers.call("prepare_sleep", level, names)
    except BaseException:
        with suppress(Exception):  # what happened first is what is raised
            workers.call("cancel_sleep")
        raise
    return sum(workers.call("sleep", level, names))


def _wake(workers: Workers, levels: Mapping[str, int], *, new_weights: bool, for_update: bool) -> None:
    """`levels`: by region, the level of its sleep. Raises what a rank raises; all sleep on then, so that a later call
    does the same on each."""
    try:
        workers.call("wake_up", new_weights, tuple(levels), for_update)
    except WorkerError:
        raise
    except BaseException:
        with suppress(Exception):
            for level in sorted(set(levels.values())):
                workers.call("sleep", level, tuple(name for name in levels if levels[name] == level))
        raise
