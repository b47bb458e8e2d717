"""`block_sparse` on GPUs: the kernel of `paged_triton`, which walks a list of key blocks for each tile and key head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dovetail.attention_backends.block_sparse.pattern import (
    BlockPattern,
    BlockSparseOptions,
    VisibleBlocks,
    head_shifts,
)
from dovetail.attention_backends.block_sparse.units import create_items
from dovetail.attention_backends.paged_triton.backend import check_setup
from dovetail.attention_backends.paged_triton.buffers import Arrays, StepArrays
from dovetail.attention_backends.paged_triton.configs import KernelConfig
from dovetail.attention_backends.paged_triton.launch import Launcher, Pattern
from dovetail.attention_backends.paged_triton.machine import device_facts
from dovetail.attention_backends.paged_triton.plan import token_records
from dovetail.contracts.attention import AttentionBatch, AttentionLayer, AttentionSetup

_MAX_DECODE_TOKENS = 4
"""Query tokens of a tile up to which the small tiles of "decode" are used."""


@dataclass(frozen=True)
class _Kind:
    """Layers that read the same blocks."""

    group: int
    shifts: tuple[int, ...]


@dataclass(frozen=True)
class _Step:
    """The launch of one kind."""

    config: KernelConfig
    num_items: int
    arrays: Arrays


class GPUKernels:
    """Plans and computes the steps of one setup. Pages as those of `paged_triton`."""

    def __init__(self, options: BlockSparseOptions, setup: AttentionSetup):
        check_setup(setup)
        self._setup = setup
        self._device = torch.device(setup.device)
        self._launcher = Launcher(setup, device_facts(self._device)[1])
        pattern = BlockPattern.of(options)
        self._block = pattern.block_size
        self._pattern = Pattern(pattern.block_size, pattern.local_blocks, pattern.vert_stride, pattern.sink_blocks)
        self._kind_of = {
            layer.layer_id: _Kind(layer.num_heads // layer.num_kv_heads, head_shifts(layer, options))
            for layer in setup.layers
        }
        self._kinds = tuple(dict.fromkeys(self._kind_of.values()))
        self._visible = {kind: VisibleBlocks(pattern, kind.shifts, setup.spec.num_kv_heads) for kind in self._kinds}
        with torch.inference_mode(False):
            self._shifts = {
                kind: torch.tensor(kind.shifts, dtype=torch.int32, device=self._device) for kind in self._kinds
            }
        self._arrays = StepArrays(self._device)
        self._arrays.add("tokens", (setup.max_num_batched_tokens, 4))
        self._steps: dict[_Kind, _Step] = {}

    def plan(self, batch: AttentionBatch) -> None:
        """Plans tiles, each in one block of the pattern, and the key blocks of each."""
        self._steps.clear()
        num_tokens = int(batch.query_start[-1])
        if num_tokens == 0:
            return
        self._arrays.begin()
        token_records(batch, self._arrays.host("tokens"), np.zeros(0, dtype=np.uint8))
        self._arrays.send("tokens", num_tokens)
        self._arrays.end()
        width = -(-batch.max_seq_len // self._setup.block_size)
        table = self._sent(batch.block_table[:, :width].reshape(-1))
        for kind in self._kinds:
            self._steps[kind] = self._plan_kind(batch, kind, table, width)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """As `AttentionBackend.forward`."""
        query = self._launcher.write(layer, query, key, value, kv_cache, self._arrays.device["tokens"])
        return self._attend(layer, query, kv_cache)

    def rotate_and_forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """As `RotatesAndWrites.rotate_and_forward`."""
        query = self._launcher.write(layer, query, key, value, kv_cache, self._arrays.device["tokens"], (cos, sin))
        return self._attend(layer, query, kv_cache)

    def _attend(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if len(query) == 0:
            return output
        kind = self._kind_of[layer.layer_id]
        step = self._steps[kind]
        self._launcher.attend(
            layer, query, kv_cache, output, step.arrays, step.config, step.num_items, self._pattern, self._shifts[kind]
        )
        return output

    def _plan_kind(self, batch: AttentionBatch, kind: _Kind, table: torch.Tensor, width: int) -> _Step:
        config = self._config(batch, kind)
        items, query_blocks = create_items(batch, self._block, config.block_m // kind.group, width)
        lists = self._visible[kind].lists(query_blocks)
        visits = np.stack((lists.begins, lists.counts), axis=2)
        visits = np.broadcast_to(visits, (len(items), self._setup.spec.num_kv_heads, 2))
        device = self._arrays.device
        arrays = Arrays(
            tokens=device["tokens"],
            table=table,
            tree=device["tokens"],
            items=self._sent(items.reshape(-1)),
            visits=self._sent(visits.reshape(-1)),
            blocks=self._sent(lists.blocks),
            partials=device["tokens"],
            sums=device["tokens"],
            members=device["tokens"],
        )
        return _Step(config, len(items), arrays)

    def _config(self, batch: AttentionBatch, kind: _Kind) -> KernelConfig:
        is_small = batch.max_query_len <= _MAX_DECODE_TOKENS
        rows = batch.max_query_len * kind.group
        # A tile must not reach into the next block of the pattern, and a step of the kernel neither.
        return self._launcher.config("decode" if is_small else "prefill", rows, kind.group, self._block)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
        if self._device.type != "cuda":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)
