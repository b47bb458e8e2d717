"""Launches of the kernels: everything that is fixed for one backend, resolved once."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from dovetail.attention_backends.paged_triton.buffers import Arrays
from dovetail.attention_backends.paged_triton.configs import KernelConfig, find_config
from dovetail.attention_backends.paged_triton.kernels import attend, merge_parts
from dovetail.attention_backends.paged_triton.passes import Kind
from dovetail.attention_backends.paged_triton.plan import RUN
from dovetail.attention_backends.paged_triton.writing import write_pages
from dovetail.contracts.attention import AttentionLayer, AttentionSetup
from dovetail.nn.triton_launch import FP_FUSION

FP8_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_TL_DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16, "float32": tl.float32}
MERGED_AT_ONCE = 16
WRITE_OPTIONS: Mapping[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Of `write_pages`. Fused, a product would be added without being rounded first."""
_WRITTEN_AT_ONCE = 2048
"""Elements of keys that one program writes, or of queries that it turns."""


def attend_options(config: KernelConfig, is_invariant: bool) -> dict[str, Any]:
    """Of `attend`. Where bits must not depend on the rest of the step, no product goes into a sum unrounded: two places
    that add the same numbers could be compiled into different instructions."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **_fusion(is_invariant)}


def merge_options(is_invariant: bool) -> dict[str, Any]:
    """Of `merge_parts`."""
    return {"num_warps": 4, **_fusion(is_invariant)}


def _fusion(is_invariant: bool) -> Mapping[str, Any]:
    return {"enable_fp_fusion": False} if is_invariant else FP_FUSION


def compute_dtype(dtype: str, kv_dtype: str) -> str:
    """What the kernel multiplies: the queries' dtype, which fp8 and int8 fit into; float32 where two wide ones mix."""
    return dtype if kv_dtype in (dtype, "int8", *FP8_LARGEST) else "float32"


def padded_head(head_size: int) -> int:
    """The power of two that tiles are wide, 16 at least."""
    return max(16, triton.next_power_of_2(head_size))


@functools.cache
def write_sizes(num_heads: int, num_kv_heads: int, head_pad: int, rotary: int) -> tuple[int, dict[str, int]]:
    """Programs of `write_pages` for each token, and constants that go with them; `num_heads` are to be turned."""
    block_q, block_h = (
        max(1, min(triton.next_power_of_2(heads), _WRITTEN_AT_ONCE // head_pad)) for heads in (num_heads, num_kv_heads)
    )
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_H": block_h,
        "BLOCK_Q": block_q,
        "ROTARY": rotary,
        "HALF_PAD": max(1, triton.next_power_of_2(rotary // 2)),
    }
    return triton.cdiv(num_kv_heads, block_h) + triton.cdiv(num_heads, block_q), constants


@dataclass(frozen=True)
class Pattern:
    """What the kernel knows of a block-sparse pattern; with `block_size` 0 it attends to all keys."""

    block_size: int = 0
    local_blocks: int = 0
    vert_stride: int = 0
    sink_blocks: int = 0


class Launcher:
    """The kernels for the layers of one setup on one architecture, with the stored configs unless others are given."""

    def __init__(self, setup: AttentionSetup, arch: int, configs: tuple[KernelConfig, ...] | None = None):
        spec = setup.spec
        self._setup = setup
        self._arch = arch
        self._configs = configs
        self.compute = compute_dtype(setup.dtype, spec.dtype)
        self.head_pad = padded_head(spec.head_size)
        self._is_int8 = spec.dtype == "int8"
        wide = {"float16": 2, "bfloat16": 2, "float32": 4}[self.compute]
        self._kv_bytes = 1 if spec.dtype in ("int8", *FP8_LARGEST) and wide == 2 else wide
        self._alibi: dict[int, torch.Tensor] = {}
        self._factors = {layer.layer_id: self._score_factors(layer) for layer in setup.layers}
        with torch.inference_mode(False):
            self._nothing = torch.zeros(1, dtype=torch.int32, device=setup.device)
            self._no_numbers = torch.zeros(1, dtype=torch.float32, device=setup.device)
            for layer in setup.layers:
                if layer.alibi_slopes is not None:
                    slopes = torch.tensor(layer.alibi_slopes, dtype=torch.float32, device=setup.device)
                    self._alibi[layer.layer_id] = slopes

    def kind(self, layer: AttentionLayer) -> Kind:
        """A tile has the query heads of one key head."""
        return Kind.of(layer)

    def config(self, kind: str, rows: int, group: int, most_keys: int | None = None) -> KernelConfig:
        """The stored config for tiles of `rows` rows; a tile holds all `group` query heads of a key head at least."""
        config = find_config(self._arch, self.head_pad, self._kv_bytes, kind, self._configs)
        block_m = max(16, triton.next_power_of_2(group))
        if kind == "prefill":
            block_m = max(block_m, config.block_m)
        else:
            block_m = max(block_m, min(triton.next_power_of_2(rows), config.block_m))
        block_n = config.block_n if most_keys is None else min(config.block_n, most_keys)
        return replace(config, block_m=block_m, block_n=block_n)

    def write(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        tokens: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """New keys and values into their slots; returns the queries with contiguous vectors.

        `angles` are cos and sin of `Operators.rotate`: keys are rotated while they are written, and queries in place.
        """
        query, key, value = (dense_vectors(tensor) for tensor in (query, key, value))
        if not len(query):
            return query
        cos, sin = (key, key) if angles is None else _dense_angles(angles, query)  # not looked at without
        num_programs, constants = self.write_constants(layer, 0 if angles is None else cos.shape[2])
        write_pages[(len(key), num_programs)](
            query,
            key,
            value,
            cos,
            sin,
            kv_cache,
            self._scales(kv_cache),
            tokens,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            cos.stride(0),
            kv_cache.stride(0),
            1.0 / layer.key_scale,
            1.0 / layer.value_scale,
            FP8_LARGEST.get(self._setup.spec.dtype, 0.0),
            **constants,
            **WRITE_OPTIONS,
        )
        return query

    def write_constants(self, layer: AttentionLayer, rotary: int) -> tuple[int, dict[str, Any]]:
        """Programs of `write_pages` for each token, and its constants, where `rotary` elements of a head are turned."""
        spec = self._setup.spec
        num_programs, sizes = write_sizes(layer.num_heads if rotary else 0, spec.num_kv_heads, self.head_pad, rotary)
        return num_programs, {
            **sizes,
            "HEAD": spec.head_size,
            "HEAD_PAD": self.head_pad,
            "PAGE": self._setup.block_size,
            "IS_FP8": spec.dtype in FP8_LARGEST,
            "IS_INT8": self._is_int8,
        }

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        arrays: Arrays,
        config: KernelConfig,
        num_items: int,
        pattern: Pattern = Pattern(),
        shifts: torch.Tensor | None = None,
    ) -> None:
        """All items of one launch; items of several parts leave them in `arrays.partials`."""
        factor, cap = self._factors[layer.layer_id]
        attend[(self._setup.spec.num_kv_heads * num_items,)](
            query,
            kv_cache,
            self._scales(kv_cache),
            output,
            arrays.tokens,
            arrays.table,
            arrays.tree,
            arrays.items,
            arrays.visits,
            arrays.blocks,
            arrays.partials,
            arrays.sums,
            arrays.members,
            self._alibi.get(layer.layer_id, self._no_numbers),
            self._sinks(layer),
            self._nothing if shifts is None else shifts,
            query.stride(0),
            query.stride(1),
            kv_cache.stride(0),
            factor,
            cap,
            self._unscale(layer.value_scale),
            layer.window or 0,
            pattern.vert_stride,
            pattern.local_blocks,
            pattern.sink_blocks,
            **self.attend_constants(layer, config, pattern.block_size),
            **attend_options(config, self._setup.batch_invariant),
        )

    def attend_constants(self, layer: AttentionLayer, config: KernelConfig, sparse_block: int) -> dict[str, Any]:
        """Constants of `attend`."""
        spec = self._setup.spec
        return {
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "NUM_KV_HEADS": spec.num_kv_heads,
            "HEAD": spec.head_size,
            "HEAD_PAD": self.head_pad,
            "PAGE": self._setup.block_size,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "COMPUTE": _TL_DTYPES[self.compute],
            "PRECISION": "ieee" if self.compute == "float32" else "tf32",
            "IS_INT8": self._is_int8,
            "HAS_WINDOW": layer.window is not None,
            "HAS_CAP": layer.soft_cap is not None,
            "HAS_SLOPES": layer.alibi_slopes is not None,
            "HAS_SINKS": layer.sinks is not None,
            "TREES": config.kind == "verify" and not self._setup.batch_invariant,
            "SHARES": config.kind != "prefill" and not sparse_block and self.can_share(layer),
            "SPLIT": RUN if self._setup.batch_invariant else 0,
            "SPARSE": sparse_block,
        }

    def can_share(self, layer: AttentionLayer) -> bool:
        """Whether requests may read the keys of a common prefix together. A window has freed these, and rows whose bits
        must not depend on others' are read alone."""
        return layer.window is None and not self._setup.batch_invariant

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
        group = layer.num_heads // layer.num_kv_heads
        merge_parts[(most_tokens * group, layer.num_kv_heads, num_merges)](
            output,
            merges,
            arrays.partials,
            arrays.sums,
            self._sinks(layer),
            self._unscale(layer.value_scale),
            **self.merge_constants(layer),
            **merge_options(self._setup.batch_invariant),
        )

    def merge_constants(self, layer: AttentionLayer) -> dict[str, Any]:
        """Constants of `merge_parts`."""
        return {
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "NUM_KV_HEADS": layer.num_kv_heads,
            "HEAD": layer.head_size,
            "HEAD_PAD": self.head_pad,
            "BLOCK_P": 1 if self._setup.batch_invariant else MERGED_AT_ONCE,
            "HAS_SINKS": layer.sinks is not None,
        }

    def _score_factors(self, layer: AttentionLayer) -> tuple[float, float]:
        """`factor` and `cap` of `attend`, computed once, so that the kernel multiplies once."""
        factor = layer.scale * self._unscale(layer.key_scale) * math.log2(math.e)
        if layer.soft_cap is None:
            return factor, 0.0
        return 2 * factor / layer.soft_cap, layer.soft_cap * math.log2(math.e)

    def _sinks(self, layer: AttentionLayer) -> torch.Tensor:
        return self._no_numbers if layer.sinks is None else layer.sinks

    def _unscale(self, scale: float) -> float:
        return scale if self._setup.spec.dtype in FP8_LARGEST else 1.0

    def _scales(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The scales of int8 pages lie between the vectors: the same memory, read as float16."""
        return kv_cache.view(torch.float16) if self._is_int8 else kv_cache


def _dense_angles(angles: tuple[torch.Tensor, torch.Tensor], query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin whose rows are contiguous and equally far apart."""
    cos, sin = angles
    if len(cos) != len(query) or cos.shape[2] > query.shape[2]:
        raise ValueError(f"angles {list(cos.shape)} for queries {list(query.shape)}")
    if cos.stride(2) != 1 or sin.stride() != cos.stride():
        return cos.contiguous(), sin.contiguous()
    return cos, sin


def dense_vectors(tensor: torch.Tensor) -> torch.Tensor:
    """[T, ..., size] whose vectors are contiguous; slices of one projection are already."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
