"""A worker some of whose regions sleep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dovetail.contracts.errors import CapacityError, PluginError, WorkerError
from dovetail.contracts.regions import KV_CACHE, WEIGHTS, drafter_label
from dovetail.worker.machine.free_memory import give_back_free_memory
from dovetail.worker.running_worker import RunningWorker
from dovetail.worker.sleep import Sleeper, kept_sleeper, lost_sleeper, weights_sleeper


class SleepingWorker:
    """Regions of one worker, which go to sleep (`prepare`, `give_memory_back`) and wake up. What is asleep, or awake,
    already stays so: where another rank failed, calls come again. The engine knows which order is legal."""

    def __init__(self, running: RunningWorker):
        """Nothing sleeps yet."""
        self.running = running
        self._device = running.loaded.setup.device
        self._asleep: dict[str, Sleeper] = {}
        self._prepared: dict[str, Sleeper] = {}
        self._is_captured = True
        """Whether graphs and recordings are there."""
        self._awaits_update = False
        """Whether the weights have memory, and no content yet."""

    @property
    def is_awake(self) -> bool:
        """Whether nothing sleeps."""
        return not self._asleep and not self._prepared

    @property
    def is_prepared(self) -> bool:
        """Whether `give_memory_back` comes next."""
        return bool(self._prepared)

    @property
    def can_run(self) -> bool:
        """Whether steps have all they need, drafters left out."""
        return WEIGHTS not in self._asleep and KV_CACHE not in self._asleep

    def prepare(self, level: int, names: Sequence[str]) -> None:
        """Waits for the device, and copies what the regions want again. Raises `CapacityError`; nothing changed then,
        as after `cancel`."""
        self.cancel()
        self._device.synchronize()
        try:
            for name in names:
                if name not in self._asleep:
                    sleeper = self._sleeper(name, level)
                    sleeper.set_aside()
                    self._prepared[name] = sleeper
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Forgets what was prepared."""
        for sleeper in self._prepared.values():
            sleeper.close()
        self._prepared = {}

    def give_memory_back(self) -> int:
        """The prepared regions sleep now; how many bytes."""
        loaded, names = self.running.loaded, list(self._prepared)
        if WEIGHTS in names and loaded.adapters is not None:
            loaded.adapters.forget_slots()  # the engine places them again
        if self._is_captured and (WEIGHTS in names or KV_CACHE in names):
            self.running.forward.release()  # graphs hold memory of their own, and addresses that will not be right
            self._is_captured = False
        given_back = 0
        for name in names:
            self._asleep[name] = sleeper = self._prepared.pop(name)
            given_back += sleeper.give_back()
        loaded.speculation.asleep = frozenset(filter(None, map(drafter_label, self._asleep)))
        self._device.release_unused()
        give_back_free_memory()
        return given_back

    def wake_up(self, names: Sequence[str], *, new_weights: bool, for_update: bool) -> None:
        """Takes memory again and fills it. Where something fails, it may be called again, but for a `WorkerError`.

        Args:
            names: regions.
            new_weights: whether another checkpoint is taken than the one that was loaded.
            for_update: weights that were dropped are not read; an update brings them.

        Raises:
            ModelError: where the weights are to be read again and cannot be, or are others and `new_weights` is False.
            WorkerError: where graphs could not be captured, for want of memory too: this process cannot be used any
                more.
        """
        waking = {name: self._asleep[name] for name in names if name in self._asleep}
        needs_weights = WEIGHTS in waking and waking[WEIGHTS].reads_weights
        if needs_weights and not for_update and not new_weights:
            self.running.loaded.check_checkpoint()
        try:
            # Handed over like steps: the calling thread may have another current stream than theirs.
            self._device.launch(partial(self._fill, waking, needs_weights and not for_update))
            self._device.synchronize()
        except BaseException:
            for sleeper in waking.values():
                sleeper.give_back()
            self._device.release_unused()
            raise
        for name, sleeper in waking.items():
            del self._asleep[name]
            sleeper.close()
        self._awaits_update = (needs_weights and for_update) or (self._awaits_update and KV_CACHE not in waking)
        loaded = self.running.loaded
        loaded.speculation.asleep = frozenset(filter(None, map(drafter_label, self._asleep)))
        if WEIGHTS not in self._asleep and not self._awaits_update:
            self._device.launch(loaded.speculation.refresh)
            self._device.synchronize()
        if self.can_run and not self._is_captured:
            self._capture()

    def close(self) -> None:
        """Lets go of all copies."""
        self.cancel()
        for sleeper in self._asleep.values():
            sleeper.close()

    def _fill(self, waking: dict[str, Sleeper], reads_weights: bool) -> None:
        for sleeper in waking.values():
            sleeper.take()
        if reads_weights:
            self.running.loaded.read_weights()

    def _capture(self) -> None:
        try:
            self.running.forward.prepare()
        except CapacityError as error:
            raise WorkerError(
                f"capturing graphs anew ran out of memory, and this process cannot be used any more: {error}"
            ) from error
        self._is_captured = True

    def _sleeper(self, name: str, level: int) -> Sleeper:
        loaded, pages = self.running.loaded, self.running.storage.tensors
        if name == KV_CACHE:
            return lost_sleeper(self._device, pages)
        if name == WEIGHTS:
            slots = loaded.adapters.tensors if loaded.adapters is not None else []
            return weights_sleeper(self._device, loaded.weights, slots, level, pages=pages)
        label = drafter_label(name)
        if label is None:
            raise PluginError(f"the engine lets {name!r} sleep, which is no region of a worker")
        return kept_sleeper(self._device, loaded.speculation.weights(label), but=loaded.weights, pages=pages)
