"""The KV cache manager: which sequence holds which blocks, on the device and on the host.

One owner for all block bookkeeping. Schedulers see it through the `KVMemory` protocol; the engine calls
`begin_schedule` and `end_schedule` around each schedule, `commit` and `trim` after a step's tokens are committed,
`free` when a sequence ends, and `drain` for a step plan that must tell of changes. It moves no data itself: workers
do, from the `BlockChanges` of each plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass

from dovetail.contracts.kv import KVLayout
from dovetail.engine.adapters.slots import AdapterSlots
from dovetail.engine.kv.events import CacheEvents
from dovetail.engine.kv.fork_prefix import find_fork_prefix
from dovetail.engine.kv.pool import NO_HOST_BLOCK, NULL_BLOCK, BlockPool, HostPool, PrefixCacheReset
from dovetail.engine.kv.prefix_cache import PrefixCache
from dovetail.engine.kv.transfers import BlockChanges, PendingTransfers
from dovetail.engine.kv.window import first_live_block
from dovetail.engine.sequence import Sequence

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class KVStatistics:
    """Usage now, and counts since the manager was made. The null block is left out."""

    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Free blocks whose content can still be found."""
    num_host_blocks: int
    num_used_host_blocks: int
    prefix_query_tokens: int
    """Known tokens of the requests that were admitted."""
    prefix_hit_tokens: int
    """Of these, the tokens that were found in the cache or shared with a fork parent."""
    num_evictions: int
    num_copied_blocks: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1; 0 where there are none."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks > 0 else 0.0


class KVCacheManager:
    """Blocks of all sequences of one engine; implements `KVMemory`.

    A layout without groups keeps nothing: there are no tables, and a sequence is granted all of its tokens or none,
    since what one step computed is gone in the next.

    All groups' tables of a sequence have equal length. A fork may share the last, partly filled block of its parent: it
    copies before it writes, while the parent goes on in place, since it writes behind all that the fork sees.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        """`num_blocks` counts the null block 0. Raises `CapacityError` for fewer than 2 blocks."""
        self.layout = layout
        self.block_size = layout.block_size
        self.pool = BlockPool(num_blocks, len(layout.groups))
        self.host_pool = HostPool(num_host_blocks)
        self.prefixes = PrefixCache(layout, self.pool, is_on=prefix_caching)
        """What is findable."""
        self._transfers = PendingTransfers(self.pool, self.host_pool)
        self._keeps = bool(layout.groups)
        self._windowed = [group for group in layout.groups if group.window is not None]
        self.adapters: AdapterSlots | None = None
        """Who grants besides: nobody where no adapters are served."""
        self.grants: dict[int, int] = {}
        """Key -> tokens that this schedule was granted for the sequence."""
        self.has_changes = False
        """Whether `drain` would tell of anything: some block changed hands, or some page moves."""
        self._unsent: set[int] = set()
        """Sequences that got their first blocks since the last drain."""
        self._new_blocks: dict[int, list[tuple[int, int, list[int]]]] = {}
        self._given_up: list[int] = []
        """Sequences that held blocks at the last drain and were preempted since."""
        self._attached: dict[int, tuple[int, int]] = {}
        self._query_tokens = self._hit_tokens = 0
        self._num_copied = self._num_swapped_out = self._num_swapped_in = 0

    @property
    def cache_events(self) -> CacheEvents:
        """What changes in the prefix cache."""
        return self.prefixes.events

    @property
    def num_blocks(self) -> int:
        """Blocks of the device pool, the null block included."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, those with cached content included."""
        return self.pool.num_free

    def awaits_prefix(self, request: Sequence) -> bool:
        """Whether the next block of the request's prompt, behind those that `attach_prefix` finds, is under way; or its
        adapter gets no slot, so that nobody need make room for it."""
        if request.adapter is not None and not self._may_run(request, refuses=True):
            return True
        return self.prefixes.awaits(request)

    def attach_prefix(self, request: Sequence) -> int:
        """Takes the longest cached prefix, or what the fork parent has computed if that is longer, and sets
        `num_computed_tokens` to its length. Also sets `num_cached_tokens` while the request was never preempted.

        Raises `ValueError` for a request that holds blocks.
        """
        if request.block_ids or request.host_block_ids:
            raise ValueError(f"request {request.request_id} holds blocks already; release it before attach_prefix")
        tables, is_hidden = self.prefixes.find(request), False
        num_registered = len(tables[0]) if tables else 0
        num_tokens = num_registered * self.block_size
        parent, num_forked = request.fork_parent, find_fork_prefix(self.layout, request)
        if parent is not None and num_forked > num_tokens:
            num_tokens = num_forked
            tables, is_hidden = self._fork_tables(parent, num_tokens), self.prefixes.is_hidden(parent)
            num_registered = num_tokens // self.block_size
        if num_tokens:
            for table in tables:
                for block in table:
                    if block != NULL_BLOCK:
                        self.pool.share(block)
            self._begin(request, tables, num_registered, is_hidden=is_hidden)
            if num_tokens % self.block_size == 0:
                request.capacity = num_tokens
        request.num_computed_tokens = num_tokens
        self._attached[request.seq_id] = (request.num_tokens, num_tokens)
        if not request.num_preemptions:
            request.num_cached_tokens = min(num_tokens, request.num_prompt_tokens)
        return num_tokens

    def grant(self, request: Sequence, num_tokens: int, reserve: int = 0) -> int:
        """Makes the request's tables hold its computed tokens, `num_tokens` more, and those that its drafter looks
        ahead, and finds a slot for its adapter. All or nothing: returns `num_tokens`, or 0 where blocks or slots are
        short, and nothing changed.

        Only what a request wants is noted in `grants`: whoever schedules more is found out.
        """
        computed = request.num_computed_tokens + num_tokens
        end = self._with_lookahead(request, computed) if request.num_lookahead_tokens else computed
        if not self._keeps:
            reserve = 0  # of what nobody takes
            if computed < request.num_tokens:
                return 0  # the part would be gone when the rest is computed
        if request.adapter is not None and not self._may_run(request, refuses=True):
            return 0
        if (reserve or end > request.capacity) and not self._grow(request, end, reserve):
            return 0
        if request.adapter is not None and self.adapters is not None:
            self.adapters.claim(request)
        if num_tokens > 0 and computed <= request.num_tokens + request.num_draft_tokens and not request.is_held:
            self.grants[request.seq_id] = num_tokens
        if num_tokens > 1 and self.prefixes.is_on:
            self.prefixes.announce(request, computed)
        return num_tokens

    def num_missing_blocks(
        self, request: Sequence, num_tokens: int, reserve: int = 0, without: Iterable[Sequence] = ()
    ) -> int:
        """How many more blocks must be free for `grant` of the same arguments, after `swap_in` if it is swapped out,
        and after `without` were preempted."""
        if request.adapter is not None and not self._may_run(request):
            return 0  # blocks would not help
        if not self._keeps:
            return 0
        freed = self._freed_by(without)
        end = self._with_lookahead(request, request.num_computed_tokens + num_tokens)
        if request.host_block_ids:
            num_held = len(request.host_block_ids[0])
            needed = self._num_to_bring(request, self.prefixes.find_swapped(request), freed)
        else:
            num_held = len(request.block_ids[0]) if request.block_ids else 0
            needed = len(self._blocks_to_copy(request))
        needed += max(0, self.layout.blocks_for(end) - num_held) * len(self.layout.groups)
        return max(0, needed + reserve - self.pool.num_free - len(freed))

    def begin_schedule(self) -> None:
        """Grants of the schedule before this one lapse."""
        self.grants.clear()
        if self.adapters is not None:
            self.adapters.begin_schedule()

    def end_schedule(self, scheduled: Iterable[int]) -> None:
        """Grants of sequences other than `scheduled` (seq_ids) are not used: nobody need wait for what they would have
        computed."""
        for seq_id in self.grants.keys() - scheduled:
            self.prefixes.withdraw(seq_id)

    def release(self, request: Sequence) -> None:
        """Gives back all blocks of the request; its tokens must be computed again."""
        self.grants.pop(request.seq_id, None)
        self._note_given_up(request)
        self.free(request)
        request.num_computed_tokens = 0
        request.num_draft_tokens = 0
        request.commit_at = 0

    def free(self, sequence: Sequence) -> None:
        """Gives back all blocks of a sequence that ended, whatever its status. Idempotent; leaves its counts."""
        self._free_device(sequence)
        host_blocks = [block for table in sequence.host_block_ids for block in table if block != NO_HOST_BLOCK]
        self._transfers.free_host(host_blocks)
        sequence.host_block_ids = []
        self.prefixes.end(sequence)
        self._attached.pop(sequence.seq_id, None)

    def commit(self, sequence: Sequence) -> None:
        """Takes note of computed tokens: full blocks become findable, blocks behind a window become free.

        Call it when `num_computed_tokens` has reached `commit_at`, after the tokens themselves are committed to
        `token_ids`; sets `commit_at` to where it is needed next. Drafts never count.
        """
        tables = sequence.block_ids
        if not tables:
            return
        computed = sequence.num_computed_tokens
        commit_at = _NEVER
        if self.prefixes.is_on:
            self.prefixes.register(sequence, computed // self.block_size)
            commit_at = (computed // self.block_size + 1) * self.block_size
        for group in self._windowed:
            num_dead = first_live_block(group, computed, self.block_size)
            self._free_dead(sequence, group.group_id, min(num_dead, len(tables[group.group_id])))
            commit_at = min(commit_at, (num_dead + 1) * self.block_size + (group.window or 0) - 1)
        sequence.commit_at = commit_at

    def forget_content(self, sequence: Sequence) -> None:
        """Makes what a sequence computed or found unfindable, whoever holds it: its pages are not to be trusted.

        Pages that a sliding window freed and those that another sequence filled with the same content are forgotten
        with them. A sequence that goes on registers its blocks again, by the hashes that it has then.
        """
        if self.prefixes.is_on:
            self.prefixes.forget(sequence)

    def trim(self, sequence: Sequence) -> None:
        """Frees blocks beyond those that the computed tokens and one more need, or that the sequence's drafter has
        written to for its next guesses: the blocks of rejected drafts."""
        tables = sequence.block_ids
        keep = sequence.num_computed_tokens // self.block_size + 1
        if sequence.num_lookahead_tokens:
            ahead = min(sequence.num_tokens + sequence.num_lookahead_tokens - 1, sequence.max_total_tokens)
            keep = max(keep, self.layout.blocks_for(ahead))
        if not tables or len(tables[0]) <= keep:
            return
        rows = zip(*(table[: keep - 1 : -1] for table in tables), strict=True)
        self._free_blocks([block for row in rows for block in row])
        for table in tables:
            del table[keep:]
        if sequence.capacity:
            sequence.capacity = keep * self.block_size

    def swap_out(self, request: Sequence) -> bool:
        """Moves the computed tokens' blocks to host memory and gives up all device blocks.

        Drafts are forgotten. False: host memory is full, nothing is computed, a block waits for its own content, or
        the request has to be computed in one go.
        """
        num_used = self.layout.blocks_for(request.num_computed_tokens)
        used = [table[:num_used] for table in request.block_ids]
        blocks = [block for table in used for block in table if block != NULL_BLOCK]
        transfers = self._transfers
        if not blocks or not num_used or len(blocks) > self.host_pool.num_free or request.needs_every_state:
            return False
        if transfers.has_incoming and any(map(transfers.is_incoming, blocks)):
            return False
        request.host_block_ids = [
            [NO_HOST_BLOCK if block == NULL_BLOCK else transfers.swap_out(block) for block in table] for table in used
        ]
        self.has_changes = True
        self.grants.pop(request.seq_id, None)
        self._note_given_up(request)
        self._free_device(request)
        request.num_draft_tokens = 0
        return True

    def swap_in(self, request: Sequence) -> bool:
        """Brings swapped blocks back, sharing those whose content is still on the device. False: nothing changed.

        Raises `ValueError` for a request that is not swapped out.
        """
        if not request.host_block_ids:
            raise ValueError(f"request {request.request_id} is not swapped out, so it cannot be swapped in")
        hits = self.prefixes.find_swapped(request)
        if self._num_to_bring(request, hits) > self.pool.num_free:
            return False
        for block in hits.values():
            self.pool.share(block)
        tables: list[list[int]] = []
        for group_id, host_table in enumerate(request.host_block_ids):
            tables.append([self._bring(hits.get((group_id, i)), block) for i, block in enumerate(host_table)])
        request.host_block_ids = []
        self._begin(request, tables, 0, is_hidden=self.prefixes.is_hidden(request))
        request.capacity = len(tables[0]) * self.block_size
        return True

    def drain(self) -> BlockChanges:
        """What changed since the last drain, for the next step plan. Call it for each plan, after `schedule`, where
        `has_changes`."""
        self.has_changes = False
        new_blocks = [(seq_id, *entry) for seq_id, entries in self._new_blocks.items() for entry in entries]
        self._new_blocks = {}
        self._unsent.clear()
        given_up, self._given_up = self._given_up, []
        changes = self._transfers.drain(new_blocks, given_up)
        self._num_copied += len(changes.copies)
        self._num_swapped_out += len(changes.swap_out)
        self._num_swapped_in += len(changes.swap_in)
        return changes

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forgets all cached content. Requests go on, and what they have and will compute is not cached either."""
        return self.prefixes.reset()

    def take_rows(self, count: int) -> list[tuple[int, ...]]:
        """Blocks, one of each group, for content that comes from elsewhere before the next plan: as many rows as are
        free, and `count` at most. Fewer too where a free block's old content is still to be swapped out."""
        groups = len(self.layout.groups)
        count = min(count, self.pool.num_free // groups)
        blocks = self.pool.take(count * groups)
        if any(map(self._transfers.is_leaving, blocks)):
            self.pool.free(blocks)
            return []
        return [tuple(blocks[start : start + groups]) for start in range(0, len(blocks), groups)]

    def give_rows_back(self, rows: Iterable[tuple[int, ...]]) -> None:
        """Frees rows of `take_rows`, the last first."""
        self.pool.free([block for row in reversed(list(rows)) for block in row])

    def adopt(self, sequence: Sequence, hashes: list[bytes], rows: list[tuple[int, ...]]) -> None:
        """The rows have the content of these blocks of the sequence now: it is findable until it is evicted."""
        self.prefixes.adopt(sequence, hashes, rows)
        self.give_rows_back(rows)

    def statistics(self) -> KVStatistics:
        """Usage and counts."""
        usage = self.pool.usage()
        return KVStatistics(
            num_blocks=self.pool.num_blocks - 1,
            num_used_blocks=usage.num_used,
            num_cached_blocks=usage.num_cached,
            num_host_blocks=self.host_pool.num_blocks,
            num_used_host_blocks=self.host_pool.num_blocks - self.host_pool.num_free,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
            num_evictions=self.pool.num_evictions,
            num_copied_blocks=self._num_copied,
            num_swapped_out_blocks=self._num_swapped_out,
            num_swapped_in_blocks=self._num_swapped_in,
        )

    def _grow(self, request: Sequence, end: int, reserve: int) -> bool:
        seq_id, tables = request.seq_id, request.block_ids
        have = len(tables[0]) if tables else 0
        count = max(0, self.layout.blocks_for(end) - have)
        shared = self._blocks_to_copy(request)
        if count * len(self.layout.groups) + len(shared) + reserve > self.pool.num_free:
            return False
        if not tables:
            tables = [[] for _ in self.layout.groups]
            self._begin(request, tables, 0, is_hidden=False)
        elif request.capacity == 0:
            self._own_last_block(request, shared)
        if count:
            for group_id, table in enumerate(tables):
                blocks = self.pool.take(count)
                table.extend(blocks)
                self._record(seq_id, group_id, have, blocks)
        request.capacity = (have + count) * self.block_size
        num_known, num_attached = self._attached.pop(seq_id, (0, 0))
        self._query_tokens += num_known
        self._hit_tokens += num_attached
        return True

    def _with_lookahead(self, request: Sequence, end: int) -> int:
        return max(end, min(end + request.num_lookahead_tokens, request.max_total_tokens))

    def _blocks_to_copy(self, request: Sequence) -> list[int]:
        """Groups in which a fork must copy its last block before it writes; none for other sequences."""
        is_fork = bool(request.block_ids) and request.capacity == 0
        return self._shared_groups(request) if is_fork else []

    def _shared_groups(self, fork: Sequence) -> list[int]:
        """Groups in which someone else holds the fork's last block. References of pending copies do not count."""
        refs, num_pins = self.pool.refs, self._transfers.num_pins
        last_blocks = [table[-1] for table in fork.block_ids]
        return [group_id for group_id, block in enumerate(last_blocks) if refs[block] - num_pins(block) > 1]

    def _own_last_block(self, fork: Sequence, shared: list[int]) -> None:
        """Makes the fork's partly filled last block writable: copies it where it is shared, and hides the content that
        is overwritten where it is not. The fork was in no batch yet, so its `NewRequest` carries the change."""
        for group_id, table in enumerate(fork.block_ids):
            source = table[-1]
            if group_id in shared:
                table[-1:] = self.pool.take(1)
                self._transfers.copy(source, table[-1])
                self.has_changes = True
                self.pool.free((source,))
            else:
                self.pool.unregister(source)

    def _begin(self, request: Sequence, tables: list[list[int]], num_registered: int, *, is_hidden: bool) -> None:
        """The request, which held no device blocks, has these now."""
        request.block_ids = tables
        request.commit_at = 0
        self.prefixes.begin(request, num_registered, is_hidden=is_hidden)
        request.capacity = 0
        self.has_changes = True
        self._unsent.add(request.seq_id)

    def _may_run(self, request: Sequence, *, refuses: bool = False) -> bool:
        """Whether the request's adapter has a slot, or can get one. `refuses`: it is noted where not."""
        if self.adapters is None or self.adapters.may_run(request):
            return True
        if refuses:
            self.adapters.refuse(request)
        return False

    def _note_given_up(self, request: Sequence) -> None:
        if request.block_ids and request.seq_id not in self._unsent:
            self._given_up.append(request.seq_id)
            self.has_changes = True

    def _fork_tables(self, parent: Sequence, num_tokens: int) -> list[list[int]]:
        num_blocks = self.layout.blocks_for(num_tokens)
        tables: list[list[int]] = []
        for group, table in zip(self.layout.groups, parent.block_ids, strict=True):
            num_dead = first_live_block(group, num_tokens, self.block_size)
            tables.append([NULL_BLOCK] * num_dead + table[num_dead:num_blocks])
        return tables

    def _free_dead(self, sequence: Sequence, group_id: int, num_dead: int) -> None:
        table = sequence.block_ids[group_id]
        start = num_dead
        while start > 0 and table[start - 1] != NULL_BLOCK:
            start -= 1
        if start < num_dead:
            self._free_blocks(table[start:num_dead][::-1])
            zeros = [NULL_BLOCK] * (num_dead - start)
            table[start:num_dead] = zeros
            self._record(sequence.seq_id, group_id, start, zeros)

    def _freed_by(self, sequences: Iterable[Sequence]) -> set[int]:
        """Device blocks that nobody holds but these."""
        tables = [table for sequence in sequences for table in sequence.block_ids]
        holders = Counter(block for table in tables for block in table if block != NULL_BLOCK)
        return {block for block, count in holders.items() if self.pool.refs[block] == count}

    def _num_to_bring(self, request: Sequence, hits: dict[tuple[int, int], int], freed: Set[int] = frozenset()) -> int:
        """Free device blocks that a swapped request takes when it comes back, `hits` on the device among them, where
        `freed` are free as well."""
        refs = self.pool.refs
        num_blocks = sum(block != NO_HOST_BLOCK for table in request.host_block_ids for block in table)
        return num_blocks - len(hits) + sum(refs[block] == 0 or block in freed for block in hits.values())

    def _bring(self, hit: int | None, host_block: int) -> int:
        """The device block that replaces a swapped one."""
        if host_block == NO_HOST_BLOCK:
            return NULL_BLOCK
        if hit is not None:
            self._transfers.free_host((host_block,))
            return hit
        (block,) = self.pool.take(1)
        self._transfers.swap_in(host_block, block)
        return block

    def _free_device(self, sequence: Sequence) -> None:
        tables = sequence.block_ids
        if len(tables) == 1:
            self._free_blocks(tables[0][::-1])
        else:
            # Row by row from the tail, so that in every group tails are evicted before their parents.
            self._free_blocks([block for row in zip(*map(reversed, tables), strict=True) for block in row])
        sequence.block_ids = []
        self.prefixes.withdraw(sequence.seq_id)
        sequence.capacity = 0
        self._new_blocks.pop(sequence.seq_id, None)
        self._unsent.discard(sequence.seq_id)

    def _free_blocks(self, blocks: list[int]) -> None:
        if NULL_BLOCK in blocks:
            blocks = [block for block in blocks if block != NULL_BLOCK]
        self.pool.free(blocks)
        if self._transfers.has_incoming:
            self._transfers.cancel_into(blocks)

    def _record(self, seq_id: int, group_id: int, index: int, blocks: list[int]) -> None:
        if seq_id not in self._unsent:
            self._new_blocks.setdefault(seq_id, []).append((group_id, index, blocks))
            self.has_changes = True
