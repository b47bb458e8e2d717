"""Passes of the target that a drafter asks for, over the pages of the requests that it drafts for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from dovetail.contracts.attention import AttentionBackend, AttentionBatch
from dovetail.contracts.draft_target import TargetPasses
from dovetail.contracts.errors import PluginError
from dovetail.contracts.model import AdapterRows, CausalLM, ModelInputs
from dovetail.contracts.speculation import DraftRequest
from dovetail.nn.host_copies import on_device
from dovetail.worker.input_batch import InputBatch


def pages_batch(
    batch: InputBatch,
    group_id: int,
    block_size: int,
    seq_ids: Sequence[int],
    starts: np.ndarray,
    counts: np.ndarray,
    tree_masks: Mapping[int, np.ndarray],
) -> tuple[np.ndarray, AttentionBatch]:
    """The slots of query tokens, and the plan of attention over the block tables of one group; arguments as in
    `DraftPages.plan`."""
    rows = np.fromiter((batch.requests[seq_id].row for seq_id in seq_ids), np.int64, len(seq_ids))
    counts = np.asarray(counts, dtype=np.int32)
    seq_lens = np.asarray(starts, dtype=np.int32) + counts
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    slots = np.arange(query_start[-1], dtype=np.int64)
    slots += np.repeat(np.asarray(starts, dtype=np.int64) - query_start[:-1], counts)
    table = batch.block_tables[group_id]
    blocks = table[np.repeat(rows, counts), slots // block_size].astype(np.int64)
    longest = int(seq_lens.max())
    planned = AttentionBatch(
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=table[rows, : -(-longest // block_size)],
        slot_mapping=blocks * block_size + slots % block_size,
        max_query_len=int(counts.max()),
        max_seq_len=longest,
        tree_masks=tree_masks,
    )
    return slots, planned


def proposing(passes: BatchPasses | None, requests: Sequence[DraftRequest]) -> AbstractContextManager[None]:
    """`BatchPasses.proposing` of a drafter that may have none."""
    return nullcontext() if passes is None else passes.proposing(requests)


class BatchPasses(TargetPasses):
    """Made with the drafter, of use once the KV memory is there."""

    def __init__(self, model: CausalLM, device: torch.device):
        self._model = model
        self._device = device
        self._batch: InputBatch | None = None
        self._block_size = 0
        self._backends: Mapping[int, AttentionBackend] = {}
        self._max_drafts: dict[int, int] = {}
        """By seq_id, of the requests of the `propose` that runs."""
        self._ends: dict[int, int] = {}
        """By seq_id, the position behind the last that was written since that `propose` began."""

    def bind(self, batch: InputBatch, block_size: int, backends: Mapping[int, AttentionBackend]) -> None:
        """Uses the target's `backends`, by KV group, over the block tables of `batch` from now on."""
        self._batch, self._block_size, self._backends = batch, block_size, backends

    @contextmanager
    def proposing(self, requests: Sequence[DraftRequest]) -> Iterator[None]:
        """Inside, `propose` runs with these requests: passes are for them alone."""
        self._max_drafts = {request.seq_id: request.max_drafts for request in requests}
        self._ends = {request.seq_id: len(request.token_ids) - 1 for request in requests}
        try:
            yield
        finally:
            self._max_drafts, self._ends = {}, {}

    @torch.inference_mode()
    def run(
        self, seq_ids: Sequence[int], starts: np.ndarray, counts: np.ndarray, token_ids: np.ndarray, skipped: Set[int]
    ) -> torch.Tensor:
        """As `TargetPasses.run`."""
        if self._batch is None:
            raise RuntimeError("the target's pages are there from the first `propose` on")
        self._check(self._batch, seq_ids, starts, counts)
        for seq_id, start, count in zip(seq_ids, starts, counts, strict=True):
            self._ends[seq_id] = max(self._ends[seq_id], int(start + count))
        slots = np.empty(0, dtype=np.int64)
        for group_id, backend in self._backends.items():
            slots, planned = pages_batch(self._batch, group_id, self._block_size, seq_ids, starts, counts, {})
            backend.plan(planned)
        adapters = self._batch.adapter_slots(seq_ids, np.asarray(counts))
        inputs = ModelInputs(
            input_ids=on_device(np.asarray(token_ids, dtype=np.int64), self._device),
            positions=on_device(slots, self._device),
            skipped_layers=frozenset(skipped),
            adapters=None if adapters is None else AdapterRows(slots=on_device(adapters, self._device)),
        )
        return self._model.forward(inputs).hidden

    def _check(self, batch: InputBatch, seq_ids: Sequence[int], starts: np.ndarray, counts: np.ndarray) -> None:
        """What the target computed must stay as it is: other requests may share it."""
        for seq_id, start, count in zip(seq_ids, starts, counts, strict=True):
            most = self._max_drafts.get(seq_id, 0)
            if not most:
                raise PluginError(
                    f"a drafter asks for a pass over request {seq_id}, which is none of its batch or wants no drafts"
                )
            known = int(batch.num_tokens[batch.requests[seq_id].row])
            if not known - 1 <= start < start + count <= known - 1 + most:
                raise PluginError(
                    f"a drafter asks for positions {start} to {start + count - 1} of a request of which {known} tokens "
                    f"are known; it may write from {known - 1} to {known - 2 + most}"
                )
            if start > self._ends[seq_id]:
                raise PluginError(
                    f"a drafter asks for positions {start} to {start + count - 1} of a request, and has written none "
                    f"from {self._ends[seq_id]} on: nothing may be left out before the first"
                )
