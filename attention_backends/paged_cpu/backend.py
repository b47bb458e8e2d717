"""Attention on CPUs over the pages themselves, in C."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch

from dovetail.attention_backends.paged_cpu.kernels import (
    DTYPES,
    SOURCE,
    Kernels,
    LayerStruct,
    PlanStruct,
    address,
)
from dovetail.attention_backends.paged_cpu.plan import ROWS, Tokens, Units, create_fixed_units, create_units
from dovetail.contracts.attention import (
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionNeed,
    AttentionSetup,
    MovesSlots,
    Reach,
)
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.nn import native

_ITEMS_PER_THREAD = 4
"""Units times key heads that a thread should find, so that all end at about the same time."""


class _ReachPlan:
    """The plan of the layers of one reach. It stays where it is, so that calls that point to it can be repeated."""

    def __init__(self) -> None:
        self.struct = PlanStruct()
        self.pointer = ctypes.addressof(self.struct)
        self.arrays: tuple[Tokens, Units] | None = None
        """What the struct points to."""


class PagedCPUBackend(MovesSlots):
    """One call per layer writes the new keys and values into the pages and attends to the pages in place.

    A page holds, by key head, transposed keys [head_size, block_size], then values [block_size, head_size]; in int8
    each of the two is followed by one float16 scale per token, and keys are turned as `SCALE_BYTES` says. Compiled once
    per machine, with its own C compiler.
    """

    contract = (1, 0)
    preference: ClassVar[int] = 10
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        kv_dtypes=frozenset({"float32", "bfloat16", "float16", "int8"}),
        sliding_window=True,
        soft_cap=True,
        alibi=True,
        trees=True,
        sinks=True,
        chunked=True,
        batch_invariant=True,
    )

    @classmethod
    def check(cls, need: AttentionNeed, options: Any, environment: Environment) -> list[str]:
        """What goes with batch invariance, and a compiler."""
        reasons = []
        if need.batch_invariant and (need.sliding_window or need.chunked):
            # Keys are cut from where the oldest window of neighbouring tokens begins.
            reasons.append("paged_cpu has no batch-invariant mode for sliding windows and chunked attention.")
        if need.batch_invariant and need.trees:
            # Keys are summed in the order of their slots, which in a tree is not that of their positions.
            reasons.append("paged_cpu has no batch-invariant mode for trees.")
        return reasons or native.reasons_against(SOURCE)

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        for key, dtype, served in (
            ("cache.dtype", setup.spec.dtype, self.capabilities.kv_dtypes or ()),
            ("model.dtype", setup.dtype, self.capabilities.dtypes),
        ):
            if dtype not in served:
                raise ConfigError(f"paged_cpu has no {dtype}; set {key} to one of {', '.join(sorted(served))}.")
        if setup.batch_invariant and not all(layer.reach.is_all for layer in setup.layers):
            raise ConfigError(
                "paged_cpu has no batch-invariant mode for sliding windows and chunked attention; choose another "
                "attention."
            )
        self._kernels = Kernels()
        self._layers = {layer.layer_id: _layer_struct(layer, setup) for layer in setup.layers}
        self._layer_pointers = {layer_id: ctypes.addressof(struct) for layer_id, struct in self._layers.items()}
        self._reaches = {layer.layer_id: layer.reach for layer in setup.layers}
        self._max_heads = max((layer.num_heads for layer in setup.layers), default=1)
        group = self._max_heads // setup.spec.num_kv_heads
        self._tokens_per_unit = max(1, ROWS // group)
        self._max_rows = self._tokens_per_unit * group
        self._partials = torch.empty(0)
        self._scratch = torch.empty(0)
        self._plans = {layer.reach: _ReachPlan() for layer in setup.layers}

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, num_kv_heads, 2 (key, value), elements of a block]: see the class."""
        spec = self.setup.spec
        token_bytes = spec.page_bytes(1) // (2 * spec.num_kv_heads)
        elements = self.setup.block_size * token_bytes // getattr(torch, spec.dtype).itemsize
        return (num_blocks, spec.num_kv_heads, 2, elements)

    def plan(self, batch: AttentionBatch) -> None:
        """Cuts the step into units of work, once for each reach."""
        if len(batch.slot_mapping) == 0:
            return
        setup = self.setup
        num_threads = torch.get_num_threads()
        items = _ITEMS_PER_THREAD * num_threads if num_threads > 1 else 1
        tokens = Tokens.of(batch, setup.block_size)
        units_wanted = items / setup.spec.num_kv_heads
        units_of: dict[Reach, Units] = {}
        for reach in self._plans:
            if setup.batch_invariant:
                units_of[reach] = create_fixed_units(tokens, self._tokens_per_unit)
            else:
                units_of[reach] = create_units(tokens, reach, setup.block_size, self._tokens_per_unit, units_wanted)
        self._reserve(max(int(units.part_start[-1]) for units in units_of.values()), num_threads)
        for reach, units in units_of.items():
            self._fill(self._plans[reach], tokens, units, num_threads)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the new tokens and attends, in one call."""
        layer_pointer = self._layer_pointers[layer.layer_id]
        output = query.new_empty(query.shape)
        if len(query) == 0:
            return output
        query, key, value = _by_token(query), _by_token(key), _by_token(value)
        self._kernels.attend(
            self._plans[self._reaches[layer.layer_id]].pointer,
            layer_pointer,
            query.data_ptr(),
            query.stride(0),
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            kv_cache.data_ptr(),
            kv_cache.stride(0) * kv_cache.itemsize,
            output.data_ptr(),
        )
        return output

    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values of single tokens; all sources are read first."""
        block_size, size = self.setup.block_size, self.setup.spec.head_size
        numbers = block_size * size
        pages, heads = kv_cache.shape[:2]
        keys = kv_cache[:, :, 0, :numbers].view(pages, heads, size, block_size)
        values = kv_cache[:, :, 1, :numbers].view(pages, heads, block_size, size)
        page, offset = source // block_size, source % block_size
        new_page, new_offset = target // block_size, target % block_size
        keys[new_page, :, :, new_offset] = keys[page, :, :, offset]
        values[new_page, :, new_offset] = values[page, :, offset]
        if self.setup.spec.dtype == "int8":
            scales = kv_cache[..., numbers:].view(pages, heads, 2, block_size, 2)
            scales[new_page, :, :, new_offset] = scales[page, :, :, offset]

    def _reserve(self, num_parts: int, num_threads: int) -> None:
        """Memory that the plans of all reaches share, since layers run one after another."""
        size = self.setup.spec.head_size
        self._partials = _grown(self._partials, num_parts * self._max_heads * (size + 2))
        self._scratch = _grown(self._scratch, num_threads * self._kernels.scratch_floats(self._max_rows, size))

    def _fill(self, plan: _ReachPlan, tokens: Tokens, units: Units, num_threads: int) -> None:
        plan.arrays = tokens, units
        struct = plan.struct
        struct.num_tokens = len(tokens.slots)
        struct.num_units = len(units.units)
        struct.num_merged = len(units.merged)
        struct.num_threads = num_threads
        struct.table_stride = tokens.block_table.shape[1]
        struct.max_rows = self._max_rows
        struct.slots = address(tokens.slots)
        struct.table = address(tokens.block_table)
        struct.positions = address(tokens.positions)
        struct.first_key = address(units.first_key)
        struct.end_key = address(tokens.end_key)
        struct.num_cached = address(tokens.num_cached)
        struct.query_first = address(tokens.query_first)
        struct.tree_row = address(tokens.tree_row)
        struct.tree = address(tokens.tree)
        struct.unit_tokens = address(units.unit_tokens)
        struct.units = address(units.units)
        struct.merged = address(units.merged)
        struct.part_start = address(units.part_start)
        struct.partials = self._partials.data_ptr()
        struct.scratch = self._scratch.data_ptr()


def _layer_struct(layer: AttentionLayer, setup: AttentionSetup) -> LayerStruct:
    slopes = layer.alibi_slopes
    return LayerStruct(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        block_size=setup.block_size,
        dtype=DTYPES[setup.dtype],
        kv_dtype=DTYPES[setup.spec.dtype],
        scale=layer.scale,
        soft_cap=layer.soft_cap or 0.0,
        slopes=(ctypes.c_float * len(slopes))(*slopes) if slopes is not None else None,
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
    )


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    """[T, heads, size] with all numbers of a token side by side, which slices of one projection are already."""
    _, between_heads, between_numbers = tensor.stride()
    if between_numbers == 1 and between_heads == tensor.shape[2]:
        return tensor
    return tensor.contiguous()


def _grown(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer if buffer.numel() >= size else torch.empty(size)
