"""Launches of the kernels: everything that is fixed for one backend, resolved once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from dovetail.attention_backends.paged_triton.buffers import Arrays
from dovetail.attention_backends.paged_triton.configs import KernelConfig, find_config, stored_configs
from dovetail.attention_backends.paged_triton.kernels import merge_parts
from dovetail.attention_backends.paged_triton.launch import (
    MERGED_AT_ONCE,
    attend_options,
    dense_vectors,
    merge_options,
    padded_head,
)
from dovetail.attention_backends.paged_triton.passes import Kind
from dovetail.attention_backends.paged_triton.plan import RUN
from dovetail.attention_backends.triton_mla.kernels import attend_latents, write_latents
from dovetail.contracts.attention import AttentionLayer, AttentionSetup
from dovetail.contracts.kv import DTYPE_BYTES, LatentSpec
from dovetail.nn.triton_launch import FP_FUSION

CONFIGS = Path(__file__).with_name("configs.json")
KINDS = ("few", "many", "runs")
"""Tiles of 16 rows; of more; of rows whose bits must not depend on others, which hold two sums."""
WRITE_OPTIONS: Mapping[str, Any] = {"num_warps": 4, **FP_FUSION}
"""Of `write_latents`."""


class LatentLauncher:
    """The kernels for the layers of one setup on one architecture, with the stored configs unless others are given."""

    def __init__(
        self, setup: AttentionSetup, latents: LatentSpec, arch: int, configs: tuple[KernelConfig, ...] | None = None
    ):
        self._setup = setup
        self._latents = latents
        self._arch = arch
        self._configs = stored_configs(CONFIGS) if configs is None else configs
        self.head_pad = padded_head(latents.latent_size)
        self._factors = {layer.layer_id: layer.scale * math.log2(math.e) for layer in setup.layers}
        self._kinds = {layer.layer_id: self._kind(layer.num_heads) for layer in setup.layers}

    def kind(self, layer: AttentionLayer) -> Kind:
        """A tile has as many heads as fit its rows, since all read the same vectors."""
        return self._kinds[layer.layer_id]

    def config(self, kind: str, rows: int, group: int) -> KernelConfig:
        """The stored config for tiles of `rows` rows, with as many as a tile may have for prompts."""
        if self._setup.batch_invariant:
            return replace(self._stored("runs"), kind=kind)
        many = self._stored("many")
        wanted = many.block_m if kind == "prefill" else min(triton.next_power_of_2(rows), many.block_m)
        block_m = max(16, triton.next_power_of_2(group), wanted)
        return replace(many if block_m > 16 else self._stored("few"), kind=kind, block_m=block_m)

    def can_share(self, layer: AttentionLayer) -> bool:
        """Rows whose bits must not depend on others' are read alone."""
        return not self._setup.batch_invariant

    def write(
        self, query: torch.Tensor, latent: torch.Tensor, kv_cache: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """New vectors into their slots; returns the queries with contiguous vectors."""
        query, latent = dense_vectors(query), dense_vectors(latent)
        if len(latent):
            write_latents[(len(latent),)](
                latent,
                kv_cache,
                tokens,
                latent.stride(0),
                kv_cache.stride(0),
                **self.write_constants(),
                **WRITE_OPTIONS,
            )
        return query

    def write_constants(self) -> dict[str, Any]:
        """Constants of `write_latents`."""
        size = self._latents.latent_size + self._latents.rotary_size
        return {"SIZE": size, "SIZE_PAD": triton.next_power_of_2(size), "PAGE": self._setup.block_size}

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        arrays: Arrays,
        config: KernelConfig,
        num_items: int,
    ) -> None:
        """All items of one launch; items of several parts leave them in `arrays.partials`."""
        attend_latents[(self.kind(layer).num_groups * num_items,)](
            query,
            kv_cache,
            output,
            arrays.tokens,
            arrays.table,
            arrays.tree,
            arrays.items,
            arrays.partials,
            arrays.sums,
            arrays.members,
            query.stride(0),
            query.stride(1),
            kv_cache.stride(0),
            self._factors[layer.layer_id],
            **self.attend_constants(layer, config),
            **attend_options(config, self._setup.batch_invariant),
        )

    def attend_constants(self, layer: AttentionLayer, config: KernelConfig) -> dict[str, Any]:
        """Constants of `attend_latents`."""
        kind, latents = self.kind(layer), self._latents
        is_invariant = self._setup.batch_invariant
        return {
            "GROUP": kind.group,
            "NUM_GROUPS": kind.num_groups,
            "LATENT": latents.latent_size,
            "LATENT_PAD": self.head_pad,
            "ROTARY": latents.rotary_size,
            "ROTARY_PAD": padded_head(latents.rotary_size),
            "PAGE": self._setup.block_size,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "PRECISION": "ieee" if latents.dtype == "float32" else "tf32",
            "TREES": config.kind == "verify" and not is_invariant,
            "SHARES": config.kind != "prefill" and not is_invariant,
            "SPLIT": RUN if is_invariant else 0,
        }

    def merge(
        self,
        layer: AttentionLayer,
        output: torch.Tensor,
        merges: torch.Tensor,
        arrays: Arrays,
        most_tokens: int,
        num_merges: int,
    ) -> None:
        """Puts the parts of tiles together whose keys were cut. `most_tokens`: of a tile, at most."""
        kind = self.kind(layer)
        merge_parts[(most_tokens * kind.group, kind.num_groups, num_merges)](
            output,
            merges,
            arrays.partials,
            arrays.sums,
            arrays.sums,  # sinks: there are none
            1.0,
            **self.merge_constants(layer),
            **merge_options(self._setup.batch_invariant),
        )

    def merge_constants(self, layer: AttentionLayer) -> dict[str, Any]:
        """Constants of `merge_parts`, to which a group of heads is a key head."""
        kind = self.kind(layer)
        return {
            "GROUP": kind.group,
            "NUM_KV_HEADS": kind.num_groups,
            "HEAD": self._latents.latent_size,
            "HEAD_PAD": self.head_pad,
            "BLOCK_P": 1 if self._setup.batch_invariant else MERGED_AT_ONCE,
            "HAS_SINKS": False,
        }

    def _kind(self, num_heads: int) -> Kind:
        most = self._stored("runs" if self._setup.batch_invariant else "many").block_m
        group = max(heads for heads in range(1, most + 1) if num_heads % heads == 0)
        return Kind(group, num_heads // group, None)

    def _stored(self, kind: str) -> KernelConfig:
        return find_config(self._arch, self.head_pad, DTYPE_BYTES[self._latents.dtype], kind, self._configs)
