"""How far the pages of a drafter that reads late hold what they should.

A drafter that guesses from tokens alone need not see a position when the target computes it: its keys and values follow
from the tokens, which are known as long as the request is. So it is called only where drafts are wanted, and reads then
what it has not read yet. Its pages belong to KV blocks that requests share, lose and get back, so what was read is
noted by block, and not by request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.contracts.step import StepPlan
from dovetail.worker.input_batch import InputBatch, StepInputs


class LateReading:
    """Of one drafter with pages of its own, over the block tables of `group_id`."""

    def __init__(self, batch: InputBatch, group_id: int, block_size: int, num_blocks: int):
        self._tables = batch.block_tables[group_id]
        self._group_id = group_id
        self._block_size = block_size
        self._num_read = np.zeros(num_blocks, dtype=np.int64)
        """By block, for how many of its first slots the pages are right."""
        self._on_host: dict[int, int] = {}
        """The same of host blocks."""

    def blocks_moved(self, plan: StepPlan) -> None:
        """A plan swaps and copies blocks, in this order, the drafter's pages with the target's."""
        for device, host in plan.swap_out:
            self._on_host[host] = int(self._num_read[device])
        for host, device in plan.swap_in:
            self._num_read[device] = self._on_host.get(host, 0)
        if plan.copies:
            sources, targets = np.array(plan.copies).T
            self._num_read[targets] = self._num_read[sources]

    def computed(self, inputs: StepInputs) -> None:
        """The target computed a step. Whatever the pages held at these slots was of other tokens."""
        blocks, offsets = np.divmod(inputs.slot_mappings[self._group_id], self._block_size)
        np.minimum.at(self._num_read, blocks, offsets)

    def first_unread(self, row: int, end: int) -> int:
        """Of the request in a row of the batch, of which `end` positions are computed, the first that the drafter has
        not read; `end` where it has read all."""
        num_read = self._num_read[self._tables[row, : -(-end // self._block_size)]]
        short = np.flatnonzero(num_read[:-1] < self._block_size)
        block = int(short[0]) if len(short) else len(num_read) - 1
        return min(block * self._block_size + int(num_read[block]), end)

    def read(self, row: int, first: int, end: int) -> None:
        """The drafter has read positions first .. end - 1, and all before them."""
        blocks = np.arange(first // self._block_size, -(-end // self._block_size))
        self._num_read[self._tables[row, blocks]] = np.minimum(end - blocks * self._block_size, self._block_size)


def read_soonest(unread: Sequence[range], most: int) -> list[range]:
    """What is read now of the positions that requests have unread: no more than `most` of all, and the shortest first,
    so that what was begun is ended. Each is the beginning of the request's own, empty where it must wait."""
    read = [span[:0] for span in unread]
    for i in sorted(range(len(unread)), key=lambda i: len(unread[i])):
        read[i] = unread[i][:most]
        most -= len(read[i])
    return read
