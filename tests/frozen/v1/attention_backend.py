"""One query token at a time, over all keys before it."""

import numpy as np
import torch

from dovetail.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionSetup,
)
from dovetail.contracts.plugin import PluginOptions


class Frozen(AttentionBackend):
    contract = (1, 0)
    preference = -100
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cpu"}), dtypes=frozenset({"float32"}), sliding_window=True
    )

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        self._written = self._pages_and_offsets(np.empty(0, dtype=np.int64))
        self._seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        spec = self.setup.spec
        return (num_blocks, self.setup.block_size, 2, spec.num_kv_heads, spec.head_size)

    def plan(self, batch: AttentionBatch) -> None:
        self._written = self._pages_and_offsets(batch.slot_mapping)
        self._seen = []
        for request, length in enumerate(batch.seq_lens.tolist()):
            positions = np.arange(length)
            blocks = batch.block_table[request, positions // self.setup.block_size].astype(np.int64)
            keys = self._pages_and_offsets(blocks * self.setup.block_size + positions % self.setup.block_size)
            num_rows = int(batch.query_start[request + 1] - batch.query_start[request])
            self._seen += [(position, *keys) for position in range(length - num_rows, length)]

    def _pages_and_offsets(self, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(slots // self.setup.block_size), torch.from_numpy(slots % self.setup.block_size)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        kv_cache[self._written] = torch.stack((key, value), dim=1)
        output = torch.empty_like(query)
        for row, (position, pages, offsets) in enumerate(self._seen):
            first = 0 if layer.window is None else max(0, position - layer.window + 1)
            keys, values = kv_cache[pages[first : position + 1], offsets[first : position + 1]].unbind(1)
            heads = query[row].view(layer.num_kv_heads, -1, layer.head_size)
            weights = (torch.einsum("hgd,nhd->hgn", heads, keys) * layer.scale).softmax(-1)
            output[row] = torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1)
        return output
