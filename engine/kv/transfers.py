"""Page moves that wait for the next step plan, kept right under the worker's fixed order.

Within one plan a worker copies all swap-outs, then all swap-ins, then all copy-on-write pairs, then runs the forward
pass. Requests gain and lose blocks in any order before that, so a move that was recorded may meet a block that has
changed hands since. Four rules keep contents right:

- The source of a copy is **pinned** (one more reference) until the plan is drained: a swap-in or another copy into
  it would come before the read.
- A move into a device block that loses its last holder is cancelled: it would overwrite what the next holder
  gets there.
- A host block that a swap-in reads is handed out again only after the plan is drained: swap-outs come first.
- A block that waits for a swap-in or a copy has no content yet, so it is not swapped out, and a copy from it
  reads its own source instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.engine.kv.pool import BlockPool, HostPool


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """What changed since the last drain; the fields of `StepPlan` of the same names."""

    new_blocks: list[tuple[int, int, int, list[int]]]
    """(seq_id, group_id, index, ids): entries index .. index + len(ids) - 1 of that block table are these now, in list
    order; other entries stay. Id 0: freed by the sliding window. A sequence that got its first blocks since
    the last drain is not listed: its `NewRequest` carries the whole table."""
    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    given_up: list[int]
    """Keys of sequences that held blocks at the last drain and were released or swapped out since: a worker that knows
    them must forget their tables. They may hold blocks again by now."""


class PendingTransfers:
    """Moves since the last drain. Within each list targets are distinct and no target is a source, so a worker
    may copy a whole list at once."""

    def __init__(self, pool: BlockPool, host: HostPool):
        self._pool = pool
        self._host = host
        self._copies: dict[int, int] = {}
        self._swap_ins: dict[int, int] = {}
        self._swap_outs: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._read_host_blocks: list[int] = []

    @property
    def has_incoming(self) -> bool:
        """Whether some device block waits for content."""
        return bool(self._copies or self._swap_ins)

    def is_leaving(self, block: int) -> bool:
        """Whether the device block, which may have no holder any more, is still to be copied to the host."""
        return block in self._swap_outs.values()

    def is_incoming(self, block: int) -> bool:
        """Whether the device block waits for content."""
        return block in self._copies or block in self._swap_ins

    def num_pins(self, block: int) -> int:
        """References to the block that pending copies hold."""
        return self._pins.get(block, 0)

    def copy(self, source: int, target: int) -> None:
        """Records device block source -> target."""
        source = self._copies.get(source, source)
        self._pool.share(source)
        self._pins[source] = self._pins.get(source, 0) + 1
        self._copies[target] = source

    def swap_in(self, host_block: int, target: int) -> None:
        """Records host_block -> device block target; the host block is free after the drain."""
        self._swap_ins[target] = host_block
        self._read_host_blocks.append(host_block)

    def swap_out(self, source: int) -> int:
        """Records device block source -> a host block, which it takes and returns."""
        host_block = self._host.take()
        self._swap_outs[host_block] = source
        return host_block

    def free_host(self, host_blocks: Iterable[int]) -> None:
        """Frees host blocks that nobody will read, and cancels moves into them."""
        for host_block in host_blocks:
            self._swap_outs.pop(host_block, None)
            self._host.free((host_block,))

    def cancel_into(self, blocks: Iterable[int]) -> None:
        """Cancels moves into those of the device blocks that nobody holds any more."""
        for block in blocks:
            if self._pool.refs[block] == 0:
                self._swap_ins.pop(block, None)
                source = self._copies.pop(block, None)
                if source is not None:
                    self._unpin(source)

    def drain(self, new_blocks: list[tuple[int, int, int, list[int]]], given_up: list[int]) -> BlockChanges:
        """Returns all moves with `new_blocks` and `given_up`, and starts again with none."""
        changes = BlockChanges(
            new_blocks,
            [(source, host_block) for host_block, source in self._swap_outs.items()],
            [(host_block, target) for target, host_block in self._swap_ins.items()],
            [(source, target) for target, source in self._copies.items()],
            given_up,
        )
        self._pool.free(self._copies.values())
        self._host.free(self._read_host_blocks)
        self._copies.clear()
        self._swap_ins.clear()
        self._swap_outs.clear()
        self._pins.clear()
        self._read_host_blocks.clear()
        return changes

    def _unpin(self, source: int) -> None:
        self._pins[source] -= 1
        if self._pins[source] == 0:
            del self._pins[source]
        self._pool.free((source,))
        self.cancel_into((source,))
