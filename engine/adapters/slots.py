"""Which adapter has which slot of the workers: the step plans say so to them.

A request is granted tokens only while its adapter has a slot, or gets one. An adapter keeps its slot while one of its
requests runs; of the others the one that was used longest ago makes room. Requests that wait long for a slot are not
overtaken by those that came later, whose adapters have one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from dovetail.contracts.scheduler import RequestStatus
from dovetail.contracts.step import AdapterPlacement
from dovetail.engine.adapters.adapter import Adapter
from dovetail.engine.sequence import Sequence

PATIENCE = 64
"""Schedules in which a request is refused a slot, before those that came later are held back for it."""


class AdapterSlots:
    """Asked by the KV memory in each `grant`; see `KVCacheManager`."""

    def __init__(self, num_slots: int, named: Callable[[str], Iterable[Adapter]]):
        """`named`: gives the adapters that have a digest, each under its own name and in its own folder."""
        self._named = named
        self._sequences: Callable[[], Iterable[Sequence]] = tuple
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()
        """By digest, the one that was used last at the end."""
        self._pinned: set[str] = set()
        self._unsent: list[AdapterPlacement] = []
        """Placements that no plan has had yet."""
        self._claimed: set[str] = set()
        """Adapters whose requests were granted tokens in this schedule."""
        self._busy: set[str] | None = None
        """Adapters of running requests, as this schedule found them when it first looked."""
        self._refused: dict[int, int] = {}
        """By seq_id, in how many schedules a request was refused a slot."""
        self._first_in_line: Sequence | None = None
        """The request that has waited for a slot too long."""
        self.has_refused = False
        """Whether this schedule refused a request for want of a slot."""
        self.lost: set[str] = set()
        """Digests of adapters that cannot be placed any more: their requests must end."""

    @property
    def num_slots(self) -> int:
        """Adapters that one step can apply."""
        return len(self._free) + len(self._slots)

    @property
    def has_changes(self) -> bool:
        """Whether `drain` has something to tell."""
        return bool(self._unsent)

    def watch(self, sequences: Callable[[], Iterable[Sequence]]) -> None:
        """`sequences`: gives those that have not ended."""
        self._sequences = sequences

    def begin_schedule(self) -> None:
        """Claims of the schedule before this one lapse."""
        self._claimed.clear()
        self._busy = None
        self.has_refused = False

    def may_run(self, sequence: Sequence) -> bool:
        """Whether the sequence's adapter has a slot, or can get one in this schedule."""
        adapter = sequence.adapter
        if adapter is None:
            return True
        if adapter.digest in self._slots:
            return not self._gives_way(sequence)
        return (bool(self._free) or self._victim() is not None) and self._can_be_placed(adapter)

    def claim(self, sequence: Sequence) -> None:
        """The sequence, which `may_run`, computes tokens in the next step: its adapter takes a slot, if it has none."""
        adapter = sequence.adapter
        if adapter is None:
            return
        if adapter.digest not in self._slots:
            self._place(adapter)
        self._slots.move_to_end(adapter.digest)
        self._claimed.add(adapter.digest)
        if self._refused:
            self.forget(sequence)

    def refuse(self, sequence: Sequence) -> None:
        """Takes note of a sequence that gets no slot in this schedule."""
        self.has_refused = True
        count = self._refused[sequence.seq_id] = self._refused.get(sequence.seq_id, 0) + 1
        if count > PATIENCE and (self._first_in_line is None or self._first_in_line.is_finished):
            self._first_in_line = sequence

    def forget(self, sequence: Sequence) -> None:
        """The sequence waits for no slot any more: it has one, or has ended."""
        self._refused.pop(sequence.seq_id, None)
        if self._first_in_line is sequence:
            self._first_in_line = None

    def drain(self) -> tuple[AdapterPlacement, ...]:
        """What the next plan tells the workers."""
        placements, self._unsent = tuple(self._unsent), []
        return placements

    def withdraw(self, placements: Iterable[AdapterPlacement]) -> None:
        """Nobody knows whether the workers placed these: a step failed."""
        for placement in placements:
            if self._slots.get(placement.digest) == placement.slot:
                self.remove(placement.digest)

    def remove(self, digest: str) -> None:
        """Whoever has this content gives its slot back."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._free.append(slot)
            self._unsent = [placement for placement in self._unsent if placement.slot != slot]
        self._pinned.discard(digest)
        self.lost.discard(digest)

    def clear(self) -> None:
        """The workers have lost all that was in slots. Pins stay."""
        pinned = set(self._pinned)
        for digest in list(self._slots):
            self.remove(digest)
        self._pinned = pinned

    def has(self, digest: str) -> bool:
        """Whether an adapter of this content has a slot. From any thread."""
        return digest in self._slots

    def pin(self, digest: str) -> None:
        """An adapter that has a slot keeps it."""
        self._pinned.add(digest)

    def unpin(self, digest: str) -> None:
        """It may lose its slot to another. Without effect for one that is not pinned."""
        self._pinned.discard(digest)

    def is_pinned(self, digest: str) -> bool:
        """Whether it keeps its slot. From any thread."""
        return digest in self._pinned

    @property
    def num_pinned(self) -> int:
        """Slots that are taken for good, or will be."""
        return len(self._pinned)

    def _can_be_placed(self, adapter: Adapter) -> bool:
        """False where no folder has its content any more, so that workers would not find what was checked."""
        if adapter.digest not in self.lost and self._readable(adapter) is None:
            self.lost.add(adapter.digest)
        return adapter.digest not in self.lost

    def _readable(self, adapter: Adapter) -> Adapter | None:
        """This one, or another of equal content, whose files are still those that were read."""
        if adapter.is_unchanged:
            return adapter
        return next((twin for twin in self._named(adapter.digest) if twin.is_unchanged), None)

    def _place(self, adapter: Adapter) -> None:
        """Gives an adapter a slot that is free or can be made so."""
        if not self._free:
            victim = self._victim()
            assert victim is not None, "may_run was not asked"
            self._free.append(self._slots.pop(victim))
        slot = self._slots[adapter.digest] = self._free.pop()
        self._unsent = [placement for placement in self._unsent if placement.slot != slot]
        self._unsent.append((self._readable(adapter) or adapter).placement(slot))

    def _victim(self) -> str | None:
        """The adapter that makes room; None where all are in use."""
        if self._busy is None:
            self._busy = {
                sequence.adapter.digest
                for sequence in self._sequences()
                if sequence.adapter is not None and sequence.status is RequestStatus.RUNNING and not sequence.is_stopped
            }
        kept = self._busy | self._claimed | self._pinned
        return next((digest for digest in self._slots if digest not in kept), None)

    def _gives_way(self, sequence: Sequence) -> bool:
        """Whether a request that does not run lets one that has waited long for a slot go first."""
        first = self._first_in_line
        return (
            first is not None
            and first is not sequence
            and not first.is_held
            and sequence.status is not RequestStatus.RUNNING
            and first.adapter is not None
            and first.adapter.digest not in self._slots
            and sequence.arrival_time >= first.arrival_time
        )
