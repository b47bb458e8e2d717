"""Attention on GPUs over the pages themselves, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dovetail.attention_backends.paged_triton import machine
from dovetail.attention_backends.paged_triton.passes import Passes, TileLauncher
from dovetail.contracts.attention import (
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionNeed,
    AttentionSetup,
    MovesSlots,
    RotatesAndWrites,
)
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment, PluginOptions

if TYPE_CHECKING:
    from dovetail.attention_backends.paged_triton.launch import Launcher

MAX_GROUP = 128
MAX_HEAD = 256


class PagedTritonBackend(MovesSlots, RotatesAndWrites):
    """One kernel for prefill, chunks, decode and verify rows: the query heads of a key head form one tile, long key
    ranges are cut over the device and put together by a second kernel.

    A page is [num_kv_heads, 2 (key, value), block_size, head_size]; in int8 each of the two is followed by one float16
    scale per token, and keys are turned as `SCALE_BYTES` says; fp8 pages hold keys / `AttentionLayer.key_scale`,
    clamped to the largest number.

    `forward` can be captured in a graph. A captured graph serves every later step with as many requests, as many
    tokens and the same `AttentionBatch.max_query_len` (which may be an upper bound), whatever lengths, pages and trees.
    """

    contract = (1, 0)
    preference: ClassVar[int] = 10
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        kv_dtypes=frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"}),
        sliding_window=True,
        soft_cap=True,
        alibi=True,
        trees=True,
        sinks=True,
        batch_invariant=True,
        graph_capture=True,
    )

    @classmethod
    def check(cls, need: AttentionNeed, options: Any, environment: Environment) -> list[str]:
        """Shapes, Triton, a GPU that the kernels compile for, and what goes with batch invariance."""
        if need.batch_invariant and need.trees:
            # Keys are summed in the order of their slots, which in a tree is not that of their positions.
            return [f"{cls.__name__} has no batch-invariant mode for trees."]
        return against_shapes(cls.__name__, need) + machine.against_machine(cls.__name__, need, environment)

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        check_setup(setup)
        num_processors, arch = machine.device_facts(torch.device(setup.device))
        self._launcher = self._create_launcher(setup, arch)
        self._passes = self.create_passes(self._launcher, num_processors)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, num_kv_heads, 2 (key, value), elements of a block]: see the class."""
        return page_shape(self.setup, num_blocks)

    def plan(self, batch: AttentionBatch) -> None:
        """Cuts the step into tiles and items, once for each kind of layer, and sends them to the device."""
        self._passes.plan(batch)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the new tokens, then launches what was planned."""
        query = self._launcher.write(layer, query, key, value, kv_cache, self._passes.tokens)
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
        """As `forward`; the launch that writes turns as well."""
        query = self._launcher.write(layer, query, key, value, kv_cache, self._passes.tokens, (cos, sin))
        return self._attend(layer, query, kv_cache)

    def _attend(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._passes.attend(layer, query, kv_cache, output)
        return output

    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values of single tokens; all sources are read first."""
        move_tokens(self.setup, kv_cache, source, target)

    def _create_launcher(self, setup: AttentionSetup, arch: int) -> Launcher:
        from dovetail.attention_backends.paged_triton.launch import Launcher

        return Launcher(setup, arch)

    def create_passes(self, launcher: TileLauncher, num_processors: int) -> Passes:
        """The plan of steps; a backend that has prompts computed otherwise overrides it."""
        return Passes(self.setup, launcher, num_processors)


def against_shapes(name: str, need: AttentionNeed) -> list[str]:
    """What the kernels cannot serve, whatever the machine."""
    reasons = []
    if max(need.head_sizes, default=0) > MAX_HEAD:
        reasons.append(f"{name} serves head sizes up to {MAX_HEAD}; the model has {max(need.head_sizes)}.")
    if need.kv_dtype == "int8" and any(size * need.block_size % 2 for size in need.head_sizes):
        reasons.append(f"{name} needs an even number of elements in a block of int8; set cache.block_size.")
    return reasons


def check_setup(setup: AttentionSetup) -> None:
    """Raises `ConfigError` for what `check` could not see."""
    can = PagedTritonBackend.capabilities
    for key, dtype, served in (
        ("cache.dtype", setup.spec.dtype, can.kv_dtypes or ()),
        ("model.dtype", setup.dtype, can.dtypes),
    ):
        if dtype not in served:
            raise ConfigError(f"paged_triton has no {dtype}; set {key} to one of {', '.join(sorted(served))}.")
    if any(layer.scale <= 0 for layer in setup.layers):
        raise ConfigError("paged_triton needs a positive scale of the scores in all layers.")
    group = max((layer.num_heads // layer.num_kv_heads for layer in setup.layers), default=1)
    if group > MAX_GROUP:
        raise ConfigError(
            f"paged_triton serves up to {MAX_GROUP} query heads for each key head; the model has {group}."
        )


def page_shape(setup: AttentionSetup, num_blocks: int) -> tuple[int, ...]:
    """[num_blocks, num_kv_heads, 2 (key, value), elements of a block]."""
    spec = setup.spec
    token_bytes = spec.page_bytes(1) // (2 * spec.num_kv_heads)
    elements = setup.block_size * token_bytes // getattr(torch, spec.dtype).itemsize
    return (num_blocks, spec.num_kv_heads, 2, elements)


def move_tokens(setup: AttentionSetup, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """`MovesSlots.move_slots` for pages of `page_shape`."""
    block_size, size = setup.block_size, setup.spec.head_size
    page, offset = source // block_size, source % block_size
    new_page, new_offset = target // block_size, target % block_size
    if kv_cache.itemsize == 1:
        kv_cache = kv_cache.view(torch.uint8)  # torch indexes no fp8
    pages, heads = kv_cache.shape[:2]
    vectors = kv_cache[..., : block_size * size].view(pages, heads, 2, block_size, size)
    vectors[new_page, :, :, new_offset] = vectors[page, :, :, offset]
    if setup.spec.dtype == "int8":
        scales = kv_cache[..., block_size * size :].view(pages, heads, 2, block_size, 2)
        scales[new_page, :, :, new_offset] = scales[page, :, :, offset]
