"""An attention backend for CPUs whose steps can be captured in a graph, for tests of the null device."""

from __future__ import annotations

import dataclasses

import torch

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.attention import AttentionBatch, AttentionLayer, AttentionSetup
from dovetail.contracts.plugin import PluginOptions


class Capturable(ReferenceBackend):
    """The reference, but for steps of graphs: those read whole block tables out of buffers that keep their addresses,
    under masks, with shapes that depend on the numbers of requests and of query tokens alone."""

    capabilities = dataclasses.replace(ReferenceBackend.capabilities, graph_capture=True)

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        width = -(-setup.max_model_len // setup.block_size)
        self._tables = torch.zeros(setup.max_num_seqs, width, dtype=torch.int64)
        self._lens = torch.zeros(setup.max_num_seqs, dtype=torch.int64)
        self._slots = torch.zeros(setup.max_num_batched_tokens, dtype=torch.int64)
        self._query_len = 0
        """Of each request; 0: the step is no graph's."""

    def plan(self, batch: AttentionBatch) -> None:
        self._query_len = batch.max_query_len if batch.is_for_graph else 0
        if not batch.is_for_graph:
            super().plan(batch)
            return
        num_requests, width = batch.block_table.shape[0], min(batch.block_table.shape[1], self._tables.shape[1])
        self._tables.zero_()
        self._tables[:num_requests, :width] = torch.from_numpy(batch.block_table[:, :width])
        self._lens[:num_requests] = torch.from_numpy(batch.seq_lens)
        self._slots[: len(batch.slot_mapping)] = torch.from_numpy(batch.slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        if not self._query_len:
            return super().forward(layer, query, key, value, kv_cache)
        slots, block_size = self._slots[: len(query)], self.setup.block_size
        kv_cache[slots // block_size, 0, slots % block_size] = key
        kv_cache[slots // block_size, 1, slots % block_size] = value
        count, length = len(query) // self._query_len, self._query_len
        pages = kv_cache[self._tables[:count]]  # [R, width, 2, block_size, kv heads, head size]
        keys, values = (pages[:, :, i].flatten(1, 2).float().permute(0, 2, 3, 1) for i in (0, 1))
        group = layer.num_heads // layer.num_kv_heads
        queries = query.float().view(count, length, layer.num_kv_heads, group, layer.head_size).permute(0, 2, 3, 1, 4)
        scores = queries.flatten(2, 3) @ keys * layer.scale  # [R, kv heads, group * length, keys]
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        own = self._lens[:count, None] - length + torch.arange(length)
        position = torch.arange(keys.shape[-1])
        is_seen = position <= own[..., None]
        if layer.window is not None:
            is_seen &= position > own[..., None] - layer.window
        hidden = ~is_seen[:, None].repeat(1, 1, group, 1)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        output = (weights @ values.transpose(2, 3)).unflatten(2, (group, length))
        return output.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)


class GraphsOnly(Capturable):
    """Refuses decode steps outside of graphs: for tests that cannot look into the workers."""

    def plan(self, batch: AttentionBatch) -> None:
        if batch.max_query_len == 1 and not batch.is_for_graph:
            raise AssertionError("a decode step ran eagerly")
        super().plan(batch)
