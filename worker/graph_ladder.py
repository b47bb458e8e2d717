"""Which steps run as captured graphs, and how they are padded to the size of one. Host code only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.worker.input_batch import StepInputs


@dataclass(frozen=True, order=True)
class GraphShape:
    """The shape of a captured graph: `num_requests` requests with `query_len` query tokens each."""

    query_len: int
    num_requests: int

    @property
    def num_tokens(self) -> int:
        """Query tokens in all."""
        return self.query_len * self.num_requests


@dataclass(frozen=True)
class PaddedStep:
    """A step padded to a graph's shape: with requests that do not exist, and with tokens after those of requests that
    have fewer. They write to block 0, which nobody reads; causality hides them from the real tokens before them."""

    query_start: np.ndarray
    seq_lens: np.ndarray
    block_tables: list[np.ndarray]
    slot_mappings: list[np.ndarray]
    token_indices: np.ndarray
    """int64 [T of the step]: index of each real token among the graph's."""


class GraphLadder:
    """The shapes that are captured, and the choice among them."""

    def __init__(self, sizes: Iterable[int], query_lens: Iterable[int], max_num_tokens: int, max_model_len: int):
        """`sizes`: numbers of requests; `query_lens`: query tokens of a request: 1 in decode steps. Shapes of more than
        `max_num_tokens` are left out."""
        self._sizes = sorted(set(sizes))
        self._query_lens = sorted(set(query_lens))
        self._max_model_len = max_model_len
        shapes = (GraphShape(length, size) for length in self._query_lens for size in self._sizes)
        self.shapes = frozenset(shape for shape in shapes if shape.num_tokens <= max_num_tokens)

    def descending(self) -> list[GraphShape]:
        """All shapes, the one with the most tokens first."""
        return sorted(self.shapes, key=lambda shape: shape.num_tokens, reverse=True)

    def choose(self, inputs: StepInputs) -> GraphShape | None:
        """The smallest shape that holds the step; None: it runs eagerly, because it has a prompt longer than any
        captured query, a tree, more requests than any graph, or a sequence too long to be padded."""
        if not self._sizes or inputs.tree_masks:
            return None
        longest = int(np.diff(inputs.query_start).max())
        length = bisect_left(self._query_lens, longest)
        size = bisect_left(self._sizes, len(inputs.seq_lens))
        if length == len(self._query_lens) or size == len(self._sizes):
            return None
        shape = GraphShape(self._query_lens[length], self._sizes[size])
        filled = inputs.seq_lens + (shape.query_len - np.diff(inputs.query_start))
        return shape if shape in self.shapes and int(filled.max()) <= self._max_model_len else None


def ladder_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests worth a graph each: padding wastes at most an eighth from 64 on, and all of them together
    are captured in seconds."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 513, 32)]
    chosen = [size for size in sizes if size < max_num_seqs]
    return [*chosen, max_num_seqs] if max_num_seqs <= 512 else chosen


def padded(inputs: StepInputs, shape: GraphShape, block_size: int) -> PaddedStep:
    """The step in the shape of a graph."""
    counts = np.diff(inputs.query_start).astype(np.int64)
    num_requests, length = len(counts), shape.query_len
    within = np.arange(len(inputs.input_ids)) - np.repeat(inputs.query_start[:-1].astype(np.int64), counts)
    token_indices = np.repeat(np.arange(num_requests, dtype=np.int64) * length, counts) + within
    seq_lens = np.full(shape.num_requests, length, dtype=np.int32)
    seq_lens[:num_requests] = inputs.seq_lens + (length - counts)
    width = -(-int(seq_lens.max()) // block_size)
    return PaddedStep(
        query_start=np.arange(shape.num_requests + 1, dtype=np.int32) * np.int32(length),
        seq_lens=seq_lens,
        block_tables=[_grown(table, shape.num_requests, width) for table in inputs.block_tables],
        slot_mappings=[_scattered(slots, token_indices, shape.num_tokens) for slots in inputs.slot_mappings],
        token_indices=token_indices,
    )


def dummy_step(shape: GraphShape, num_groups: int, max_model_len: int, block_size: int) -> PaddedStep:
    """A step of a graph's shape in which no request exists: for capturing it."""
    width = -(-max_model_len // block_size)
    return PaddedStep(
        query_start=np.arange(shape.num_requests + 1, dtype=np.int32) * np.int32(shape.query_len),
        seq_lens=np.full(shape.num_requests, shape.query_len, dtype=np.int32),
        block_tables=[np.zeros((shape.num_requests, width), dtype=np.int32) for _ in range(num_groups)],
        slot_mappings=[np.zeros(shape.num_tokens, dtype=np.int64) for _ in range(num_groups)],
        token_indices=np.arange(0, dtype=np.int64),
    )


def _grown(table: np.ndarray, num_requests: int, width: int) -> np.ndarray:
    grown = np.zeros((num_requests, max(width, table.shape[1])), dtype=np.int32)
    grown[: table.shape[0], : table.shape[1]] = table
    return grown


def _scattered(slots: np.ndarray, token_indices: np.ndarray, num_tokens: int) -> np.ndarray:
    scattered = np.zeros(num_tokens, dtype=np.int64)
    scattered[token_indices] = slots
    return scattered


def check_sizes(sizes: Sequence[int], max_num_seqs: int) -> str | None:
    """What is wrong with the batch sizes of a `Runtime`, which any executor may bring; None if nothing is."""
    if any(size < 1 for size in sizes):
        return "batch sizes of graphs start at 1"
    if sizes and max(sizes) > max_num_seqs:
        return f"a graph of {max(sizes)} requests is never used: scheduler.max_num_seqs is {max_num_seqs}"
    return None
