"""Blocks that a connector keeps besides the device: prompts are looked up there before they are computed, and full
blocks go there once they are computed. All of it happens between steps.

A request whose blocks are loaded is held. The records arrive in the workers' host memory; only then are device blocks
taken, filled and registered in the prefix cache, all within one call, and the request goes on and finds them there like
any other cached prefix. So whatever becomes of a load, no block is held for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dovetail.contracts.kv_connector import TRANSFER_PARAMS, KVConnector
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.sequence import Sequence as TokenSequence
from dovetail.engine.workers import Workers
from dovetail.worker.exchange_orders import ExchangeOrders, ExchangeReport

logger = logging.getLogger(__name__)

POLL_S = 0.002
"""How often workers are asked while nothing else happens and something is under way."""
_MOST_REMEMBERED = 1 << 16
"""Hashes of blocks that were handed over and not acknowledged."""

Answer = TypeVar("Answer")
CreateConnector = Callable[[bytes], KVConnector]
"""Creates the connector of a namespace."""


@dataclass(slots=True)
class ExternalStatistics:
    """Counts since the engine started."""

    is_on: bool = True
    """False once the connector raised or was closed."""
    num_query_tokens: int = 0
    """Tokens of prompts that were looked up, those in the prefix cache left out."""
    num_hit_tokens: int = 0
    """Of these, tokens whose blocks came from the connector."""
    num_loaded_blocks: int = 0
    num_saved_blocks: int = 0
    num_dropped_blocks: int = 0
    """Not saved, since the connector was slower than the engine."""
    num_failures: int = 0
    """Records that some rank could not read or write."""
    num_corrupt: int = 0
    """Records that were not what was written."""
    num_timeouts: int = 0
    """Loads that took too long."""


@dataclass(slots=True)
class _Load:
    """Blocks of one prompt on their way."""

    sequence: TokenSequence
    hashes: list[bytes]
    deadline: float
    by_rank: dict[int, int] = field(default_factory=dict)
    """Leading blocks that each rank has, of those that have answered."""


class ExternalBlocks:
    """The exchange of one engine with its connector. Not thread-safe but for `is_due`."""

    def __init__(
        self,
        create: CreateConnector,
        workers: Workers,
        kv: KVCacheManager,
        namespace: bytes,
        *,
        load_s: float,
        queued_bytes: int,
        notify: Callable[[], None],
    ):
        """Opens the stores of all ranks. `load_s`: how long a request waits at most. `queued_bytes`: of records that
        wait for the store, on each rank. `notify`: called, from another thread, when `tick` has something to do.
        Raises what opening raises."""
        self.statistics = ExternalStatistics()
        self.is_due = False
        """Whether `tick` should be called although no step is wanted."""
        self._create = create
        self._workers = workers
        self._load_s = load_s
        self._queued_bytes = queued_bytes
        self._notify = notify
        self._candidates: deque[tuple[TokenSequence, Mapping[str, Any]]] = deque()
        self._loads: dict[int, _Load] = {}
        self._next_id = 0
        self._stuck: dict[int, set[int]] = {}
        """Loads that nobody waits for, and the ranks on which they have not ended."""
        self._cancelled: list[int] = []
        self._placed: dict[int, tuple[TokenSequence, int]] = {}
        """By seq_id, whose blocks are in the prefix cache and who has not begun, and how many."""
        self._handed_over: OrderedDict[bytes, None] = OrderedDict()
        """Blocks that not all ranks have written yet. Of others the connector says whether it wants them: what was
        written once may be gone since, removed by another engine."""
        self._acknowledged: OrderedDict[bytes, set[int]] = OrderedDict()
        """By block, the ranks that have written it, of those that not all have."""
        self._num_open = 0
        self._is_copying = False
        self._has_timer = False
        self._open(kv, namespace)

    def _open(self, kv: KVCacheManager, namespace: bytes) -> None:
        self._kv = kv
        kv.prefixes.computed = deque()
        self._num_ranks = len(self._workers.call("open_blocks", namespace, self._queued_bytes))
        self._connector = self._create(namespace)

    def reopen(self, kv: KVCacheManager, namespace: bytes) -> None:
        """The weights or the KV memory were replaced. No load is under way: `abandon` came before."""
        self._ask("close", self._connector.close)
        self._handed_over.clear()
        self._acknowledged.clear()
        self._stuck.clear()
        self._cancelled.clear()
        self._num_open = 0
        self._is_copying = False
        self._open(kv, namespace)

    def consider(self, sequence: TokenSequence) -> None:
        """A new request: what its prompt's blocks are, `tick` asks for."""
        if not self.statistics.is_on:
            return
        if sequence.num_tokens > self._kv.block_size and self._kv.prefixes.may_search(sequence):
            found = sequence.sampling.extra.get(TRANSFER_PARAMS)
            self._candidates.append((sequence, found if isinstance(found, Mapping) else {}))

    def tick(self, *, may_place: bool) -> None:
        """Does what can be done without waiting. To be called between steps, before one is scheduled, while no region
        of the workers sleeps. `may_place`: whether no step is planned that was not handed over."""
        self.is_due = False
        if not (self._loads or self._candidates or self._num_open or self._kv.prefixes.computed or self._cancelled):
            return
        if not self.statistics.is_on:
            self._let_go()
            return
        saves = self._take_computed()
        if saves or self._loads or self._num_open or self._cancelled:
            self._exchange(ExchangeOrders(saves=saves, cancelled=self._take_cancelled()))
        if may_place:
            self._end_loads()
        self._start_loads()
        self._set_timer()

    def flush(self, *, waits: bool = False) -> None:
        """Hands over what was computed, after a step. `waits`: and waits until it is written, a few seconds at most."""
        saves = self._take_computed() if self.statistics.is_on else []
        if saves or waits:
            self._exchange(ExchangeOrders(saves=saves, waits=waits))
            self._set_timer()

    def abandon(self) -> None:
        """Nothing that is under way may reach a page any more: requests that wait for blocks compute them."""
        for load_id in list(self._loads):
            self._give_up(load_id)
        self._candidates.clear()
        if self._kv.prefixes.computed is not None:
            self._kv.prefixes.computed.clear()

    def close(self) -> None:
        """The engine shuts down; workers close their stores themselves."""
        self.abandon()
        self._ask("close", self._connector.close)
        self.statistics.is_on = False

    def _take_computed(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Blocks whose sequences have shown that their numbers are fit to be used: NaN in a part of a prompt shows only
        when the first token is drawn."""
        computed, prefixes = self._kv.prefixes.computed, self._kv.prefixes
        if not computed:
            return []
        saves: list[tuple[bytes, tuple[int, ...]]] = []
        later: list[tuple[TokenSequence, list[bytes]]] = []
        while computed:
            sequence, hashes = computed.popleft()
            if not sequence.num_output_tokens and sequence.pooling is None:
                if not sequence.is_finished:
                    later.append((sequence, hashes))
                continue
            for block_hash in hashes:
                if block_hash not in self._handed_over and self._ask("wants", self._connector.wants, block_hash):
                    row = prefixes.find_row(block_hash)
                    if row is not None:
                        saves.append((block_hash, row))
                        self._remember(block_hash)
        computed.extend(later)
        return saves

    def _remember(self, block_hash: bytes) -> None:
        self._handed_over[block_hash] = None
        if len(self._handed_over) > _MOST_REMEMBERED:
            self._handed_over.popitem(last=False)

    def _take_cancelled(self) -> list[int]:
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def _exchange(self, orders: ExchangeOrders) -> None:
        reports: list[ExchangeReport] = self._workers.call("exchange_blocks", orders)
        self._num_open = max(report.num_open for report in reports)
        self._is_copying = any(report.num_copying for report in reports)
        removed: list[bytes] = []
        saved: list[bytes] = []
        counts = self.statistics
        for rank, report in enumerate(reports):
            counts.num_failures += report.num_failed
            counts.num_corrupt += report.num_corrupt
            removed += report.removed
            saved += self._whole(rank, report.saved)
            for block_hash in report.refused:
                self._handed_over.pop(block_hash, None)
            for load_id, num_blocks in report.loaded.items():
                self._note_loaded(rank, load_id, num_blocks)
        counts.num_dropped_blocks += max(report.num_dropped for report in reports)
        counts.num_saved_blocks += len(saved)
        # What is in both was removed after it was saved: it was not handed over again before this report.
        if saved:
            self._ask("saved", self._connector.saved, saved)
        if removed:
            self._ask("removed", self._connector.removed, removed)
        for block_hash in saved:
            self._handed_over.pop(block_hash, None)
        for block_hash in removed:
            self._handed_over.pop(block_hash, None)
            self._acknowledged.pop(block_hash, None)

    def _whole(self, rank: int, hashes: Sequence[bytes]) -> list[bytes]:
        """Those of which this rank was the last to write its part."""
        if self._num_ranks == 1:
            return list(hashes)
        whole = []
        for block_hash in hashes:
            ranks = self._acknowledged.pop(block_hash, set()) | {rank}
            if len(ranks) == self._num_ranks:
                whole.append(block_hash)
            else:
                self._acknowledged[block_hash] = ranks
                if len(self._acknowledged) > _MOST_REMEMBERED:
                    self._acknowledged.popitem(last=False)
        return whole

    def _note_loaded(self, rank: int, load_id: int, num_blocks: int) -> None:
        if load_id in self._loads:
            self._loads[load_id].by_rank[rank] = num_blocks
        elif load_id in self._stuck:
            self._stuck[load_id].discard(rank)
            if not self._stuck[load_id]:
                del self._stuck[load_id]

    def _end_loads(self) -> None:
        now = time.monotonic()
        for load_id, load in list(self._loads.items()):
            if load.sequence.is_finished:
                self._give_up(load_id)
            elif len(load.by_rank) == self._num_ranks:
                self._place(load_id, load)
            elif now > load.deadline:
                self.statistics.num_timeouts += 1
                self._give_up(load_id)

    def _place(self, load_id: int, load: _Load) -> None:
        """The blocks come into the prefix cache, and the request goes on."""
        hashes = load.hashes[: min(load.by_rank.values())]
        rows = self._kv.take_rows(len(hashes))
        hashes = hashes[: len(rows)]
        del self._loads[load_id]
        try:
            self._exchange(ExchangeOrders(places=[(load_id, rows)]))
        except BaseException:
            self._kv.give_rows_back(rows)
            load.sequence.wait_for_blocks(False)
            raise
        self._kv.adopt(load.sequence, hashes, rows)
        self.statistics.num_loaded_blocks += len(hashes)
        self.statistics.num_hit_tokens += len(hashes) * self._kv.block_size
        if hashes:
            self._placed[load.sequence.seq_id] = load.sequence, len(hashes)
        load.sequence.wait_for_blocks(False)

    def _give_up(self, load_id: int) -> None:
        load = self._loads.pop(load_id)
        if len(load.by_rank) < self._num_ranks:
            self._stuck[load_id] = set(range(self._num_ranks)) - load.by_rank.keys()
        self._cancelled.append(load_id)
        if not load.sequence.is_finished:
            load.sequence.wait_for_blocks(False)

    def _start_loads(self) -> None:
        """Of the requests that have not begun, as many as the prefix cache may hold blocks for: loading more would
        evict what those before them wait for."""
        if not self._candidates or self._stuck:
            self._candidates = deque(one for one in self._candidates if _may_begin(one[0]))
            return
        self._placed = {key: one for key, one in self._placed.items() if _may_begin(one[0])}
        under_way = sum(len(load.hashes) for load in self._loads.values())
        budget = (
            self._kv.num_blocks // (2 * len(self._kv.layout.groups))
            - under_way
            - sum(count for _, count in self._placed.values())
        )
        loads: list[tuple[int, list[bytes], Mapping[str, Any]]] = []
        waiting, self._candidates = self._candidates, deque()
        for sequence, transfer in waiting:
            if not _may_begin(sequence):
                continue
            if budget <= 0 or sequence.waits_for_adapter:
                self._candidates.append((sequence, transfer))
                continue
            hashes = self._missing(sequence, transfer)[:budget]
            if hashes:
                budget -= len(hashes)
                self._next_id += 1
                self._loads[self._next_id] = _Load(sequence, hashes, time.monotonic() + self._load_s)
                loads.append((self._next_id, hashes, transfer))
                sequence.wait_for_blocks(True)
        if loads:
            self._exchange(ExchangeOrders(loads=loads))

    def _missing(self, sequence: TokenSequence, transfer: Mapping[str, Any]) -> list[bytes]:
        """Hashes of the blocks behind those in the prefix cache that the connector seems to have."""
        hashes = self._kv.prefixes.missing_hashes(sequence)
        self.statistics.num_query_tokens += len(hashes) * self._kv.block_size
        if not hashes:
            return []
        found = self._ask("lookup", self._connector.lookup, hashes, transfer)
        return hashes[: max(0, min(int(found or 0), len(hashes)))]

    def _ask(self, call: str, method: Callable[..., Answer], *arguments: Any) -> Answer | None:
        """A call of the connector; one that raises is switched off."""
        if not self.statistics.is_on:
            return None
        try:
            return method(*arguments)
        except Exception:
            name = type(self._connector).__name__
            logger.exception("KV connector %s: %s raised; the engine goes on without it", name, call)
            self.statistics.is_on = False
            return None

    def _let_go(self) -> None:
        """Nobody waits for a connector that is switched off."""
        self.abandon()
        if self._cancelled:
            self._exchange(ExchangeOrders(cancelled=self._take_cancelled()))
        self._num_open = 0

    def _set_timer(self) -> None:
        """While nothing else happens, somebody must ask again."""
        if self._has_timer or not (self._loads or self._stuck or self._is_copying):
            return
        self._has_timer = True
        timer = threading.Timer(POLL_S, self._ring)
        timer.daemon = True
        timer.start()

    def _ring(self) -> None:
        self._has_timer = False
        self.is_due = True
        self._notify()


def _may_begin(sequence: TokenSequence) -> bool:
    """Whether it has not begun to compute."""
    return not (sequence.is_finished or sequence.block_ids or sequence.host_block_ids or sequence.num_computed_tokens)
