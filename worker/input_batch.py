"""The persistent batch: what a worker knows of its requests, in arrays that change only where a plan says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.contracts.step import NewRequest, StepPlan
from dovetail.worker.adapters.slots import WorkerAdapters, rows_of

NO_GROUP = -1
"""In the place of a KV group: that of layers that keep nothing."""


@dataclass(slots=True)
class BatchRequest:
    """One request of the batch."""

    row: int
    """In the persistent arrays."""
    request: NewRequest


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's inputs: R requests, by batch index, with T query tokens. Arrays are valid until the next step."""

    rows: np.ndarray
    """[R] int64: row of each request in the persistent arrays."""
    query_start: np.ndarray
    """[R + 1] int32"""
    seq_lens: np.ndarray
    """[R] int32: tokens whose KV is known after this step."""
    input_ids: np.ndarray
    """[T] int64"""
    positions: np.ndarray
    """[T] int64: for position embeddings; in a tree, by depth."""
    block_tables: list[np.ndarray]
    """Per KV group, [R, blocks of the longest request] int32."""
    slot_mappings: list[np.ndarray]
    """Per KV group, [T] int64."""
    num_drafts: np.ndarray
    """[R] int32: how many of the query tokens are drafts, the last ones."""
    reaches_end: np.ndarray
    """[R] bool: whether the last known token is computed, so that the next one can be drawn."""
    tree_masks: dict[int, np.ndarray] = field(default_factory=dict)
    adapter_slots: np.ndarray | None = None
    """[T] int32: the slot of each token's low-rank adapter, -1 for none; None where no token has one."""

    token_types: np.ndarray | None = None
    """[T] int64: the type of each token; None where all are 0."""

    def pages_of(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Block table and slots of a KV group, for `AttentionBatch`; of `NO_GROUP` empty ones."""
        if group == NO_GROUP:
            return np.empty((len(self.rows), 0), dtype=np.int32), np.empty(0, dtype=np.int64)
        return self.block_tables[group], self.slot_mappings[group]


class InputBatch:
    """Rows of requests: token ids, counts and block tables."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        max_ahead: int,
        adapters: WorkerAdapters | None = None,
    ):
        """`max_ahead`: most tokens behind the known ones that a step computes of a request. `adapters`: None where
        requests have none."""
        self._adapters = adapters
        self._block_size = block_size
        width = max_model_len + max_ahead + 1
        num_blocks = -(-width // block_size)
        self.token_ids = np.zeros((max_num_seqs, width), dtype=np.int32)
        """Known tokens, then those that `write_ahead` put behind them."""
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_tables = [np.zeros((max_num_seqs, num_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._token_types: dict[int, np.ndarray] = {}
        """By row, int64: types of the tokens of requests that have any."""
        self.requests: dict[int, BatchRequest] = {}
        """By seq_id."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: NewRequest) -> None:
        """A request comes, or comes back."""
        row = self._free_rows.pop()
        self.requests[request.seq_id] = BatchRequest(row, request)
        self.num_tokens[row] = len(request.token_ids)
        self.num_computed[row] = request.num_computed_tokens
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        if request.token_types:
            self._token_types[row] = np.array(request.token_types, dtype=np.int64)
        for table, blocks in zip(self.block_tables, request.block_ids, strict=True):
            table[row, : len(blocks)] = blocks
            table[row, len(blocks) :] = 0  # the row's last request had others

    def remove(self, seq_id: int) -> None:
        """A request leaves; unknown ones are passed over."""
        entry = self.requests.pop(seq_id, None)
        if entry is not None:
            self._free_rows.append(entry.row)
            self._token_types.pop(entry.row, None)

    def apply(self, plan: StepPlan) -> None:
        """Takes in block changes and new requests. Requests that leave were removed before."""
        for seq_id, group, index, blocks in plan.new_blocks:
            row = self.requests[seq_id].row
            self.block_tables[group][row, index : index + len(blocks)] = blocks
        for request in plan.new_requests:
            self.add(request)

    def catch_up(self, plan: StepPlan) -> None:
        """Takes in what the last stage sampled and drafted. Requests that leave were removed before."""
        for seq_id, tokens in plan.sampled:
            row = self.requests[seq_id].row
            self.extend(row, tokens)
            # Of the drafts that were computed, the rejected ones are computed anew; the last token never was.
            self.num_computed[row] = min(self.num_computed[row], self.num_tokens[row] - 1)
        for seq_id, drafts in plan.draft_tokens:
            self.write_ahead(seq_id, drafts.token_ids)

    def adapter_slots(self, seq_ids: Sequence[int], counts: np.ndarray) -> np.ndarray | None:
        """int32 [sum of counts]: the slot of each token's adapter, of so many tokens of each request; None where no
        request has one. Raises `ModelError` where one could not be placed."""
        if self._adapters is None:
            return None
        return rows_of(self._adapters, [self.requests[seq_id].request for seq_id in seq_ids], counts)

    def known_tokens(self, seq_id: int) -> np.ndarray:
        """int32: a view of the tokens of a request in the batch, read-only because drafters get it."""
        row = self.requests[seq_id].row
        view = self.token_ids[row, : self.num_tokens[row]]
        view.flags.writeable = False
        return view

    def write_ahead(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Tokens behind the known ones of a request, for the next step to compute; they do not become known."""
        row = self.requests[seq_id].row
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(token_ids)] = token_ids

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """One drawn token for each of `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1

    def extend(self, row: int, tokens: list[int]) -> None:
        """Accepted tokens, and the token after them, for one row."""
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(tokens)] = tokens
        self.num_tokens[row] += len(tokens)

    def prepare(self, plan: StepPlan) -> StepInputs:
        """The step's flat arrays."""
        requests = self.requests
        rows = np.array([requests[seq_id].row for seq_id in plan.seq_ids], dtype=np.int64)
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        computed = self.num_computed[rows]
        seq_lens = computed + counts
        if len(rows) == query_start[-1]:
            token_rows, indices = rows, computed.astype(np.int64)
        else:
            token_rows = np.repeat(rows, counts)
            indices = np.arange(query_start[-1], dtype=np.int64)
            indices += np.repeat(computed.astype(np.int64) - query_start[:-1], counts)
        num_drafts = np.zeros_like(counts) if plan.num_drafts is None else np.asarray(plan.num_drafts, dtype=np.int32)
        width = -(-int(seq_lens.max()) // self._block_size)
        blocks, offsets = indices // self._block_size, indices % self._block_size
        return StepInputs(
            rows=rows,
            query_start=query_start,
            seq_lens=seq_lens,
            input_ids=self.token_ids[token_rows, indices].astype(np.int64),
            positions=indices,
            block_tables=[table[rows, :width] for table in self.block_tables],
            slot_mappings=[
                table[token_rows, blocks].astype(np.int64) * self._block_size + offsets for table in self.block_tables
            ],
            num_drafts=num_drafts,
            reaches_end=seq_lens - num_drafts >= self.num_tokens[rows],
            adapter_slots=None if self._adapters is None else self.adapter_slots(plan.seq_ids, counts),
            token_types=self._types_of(rows, query_start, indices) if self._token_types else None,
        )

    def _types_of(self, rows: np.ndarray, query_start: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """int64 [T]: the types of the tokens at `indices` of their requests, which are in `rows`."""
        types = np.zeros_like(indices)
        for index, row in enumerate(rows.tolist()):
            if (of_row := self._token_types.get(row)) is not None:
                tokens = slice(query_start[index], query_start[index + 1])
                types[tokens] = of_row[indices[tokens]]
        return types
