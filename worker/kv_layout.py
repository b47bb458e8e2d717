"""From the model's layers to a KV layout, and how many blocks fit in memory and how many requests need.

Block id 0 is the **null block**: block tables hold it for pages that a sliding window has freed, and it is never
allocated. Every `num_blocks` counts it, so that `num_blocks` is the number of pages in each KV tensor of a worker, and
`num_blocks - 1` blocks can hold tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dovetail.contracts.attention import TransientSpec
from dovetail.contracts.errors import CapacityError, ConfigError, ModelError
from dovetail.contracts.executor import StagedKVLayout
from dovetail.contracts.kv import (
    DTYPE_BYTES,
    CrossSpec,
    ExtraTensors,
    KVGroup,
    KVLayout,
    KVSpec,
    LatentSpec,
    LayerCache,
    StateSpec,
)

MAX_GROUPS = 8
"""Each group costs a block table per request and a plan per step; splitting kinds of layers stops here."""


def build_layout(
    caches: Sequence[LayerCache | None], block_size: int, extra_caches: Mapping[str, Sequence[LayerCache]] | None = None
) -> KVLayout:
    """Cuts the layers into groups that share KV tensors.

    `caches[layer_id]` is what that layer caches, None or a `TransientSpec` where it caches nothing. Layers of equal
    caches form a kind (full attention comes first, then windows from narrow to wide). A block id costs a page in every
    KV tensor, so a kind with fewer layers than KV tensors wastes pages; a kind with many layers is therefore split into
    several groups with as many layers each.

    `extra_caches` holds what attention layers cache that are not the model's own, by the name of their owner. These get
    KV tensors of their own and use the block tables of the first group that keeps all pages; if the model has none, one
    without layers is added, whose blocks serve them alone.

    Where no layer caches anything, which is so of encoders, there are no groups and no KV tensors.

    Raises `ModelError` for caches that cannot be served, `ConfigError` for a dtype or block size that is unknown.
    """
    if block_size < 1:
        raise ConfigError(f"cache.block_size is {block_size}; it must be at least 1")
    kinds: dict[KVSpec, list[int]] = {}
    page_bytes = 0
    for layer_id, cache in enumerate(caches):
        if cache is not None and not isinstance(cache, TransientSpec):
            spec = _checked(layer_id, cache)
            kinds.setdefault(spec, []).append(layer_id)
            page_bytes = max(page_bytes, spec.page_bytes(block_size))
    if not caches:
        raise ModelError("the model has no attention layers")
    if not kinds and not extra_caches:
        return KVLayout(block_size, groups=(), page_bytes=0, num_tensors=0)
    if not kinds:
        raise ModelError("no layer of the model caches keys and values, so there is nothing that drafters could guess")
    num_tensors = _choose_num_tensors([len(layer_ids) for layer_ids in kinds.values()])
    groups: list[KVGroup] = []
    for spec in sorted(kinds, key=lambda spec: spec.window or 0):
        layer_ids = kinds[spec]
        for start in range(0, len(layer_ids), num_tensors):
            groups.append(KVGroup(len(groups), tuple(layer_ids[start : start + num_tensors]), spec.window))
    if extra_caches and all(group.window is not None for group in groups):
        groups.append(KVGroup(len(groups), (), None))
    group_id = next((group.group_id for group in groups if group.window is None), 0)
    extra_tensors = tuple(
        ExtraTensors(
            owner, group_id, tuple(_checked(i, cache).page_bytes(block_size) for i, cache in enumerate(layers))
        )
        for owner, layers in (extra_caches or {}).items()
    )
    return KVLayout(block_size, tuple(groups), page_bytes, num_tensors, extra_tensors)


def cut_layout(layout: KVLayout, caches: Sequence[Sequence[LayerCache | None]]) -> StagedKVLayout:
    """Cuts a layout of the whole model into what each pipeline stage keeps. `caches`: by stage, what its layers cache;
    together they are those that the layout was built from. The last stage keeps the extra tensors."""
    stages = []
    first = 0
    for stage, held in enumerate(caches):
        own = range(first, first + len(held))
        groups = tuple(
            replace(group, layer_ids=tuple(layer - first for layer in group.layer_ids if layer in own))
            for group in layout.groups
        )
        paged = [cache for cache in held if cache is not None and not isinstance(cache, TransientSpec)]
        stages.append(
            KVLayout(
                layout.block_size,
                groups,
                page_bytes=max((_checked(0, cache).page_bytes(layout.block_size) for cache in paged), default=0),
                num_tensors=max((len(group.layer_ids) for group in groups), default=0),
                extra_tensors=layout.extra_tensors if stage == len(caches) - 1 else (),
            )
        )
        first = own.stop
    return StagedKVLayout(**vars(layout), stages=tuple(stages))


def of_stage(layout: KVLayout, stage: int) -> KVLayout:
    """Returns what the workers of a pipeline stage keep of a layout."""
    return layout.stages[stage] if isinstance(layout, StagedKVLayout) else layout


def stage_block_bytes(layout: KVLayout) -> tuple[int, ...]:
    """Returns the bytes that one block id costs a worker of each stage."""
    stages = layout.stages if isinstance(layout, StagedKVLayout) else (layout,)
    return tuple(stage.block_bytes for stage in stages)


def _checked(layer_id: int, cache: LayerCache) -> KVSpec:
    if isinstance(cache, StateSpec):
        raise ModelError(
            f"layer {layer_id} keeps a recurrent state (Mamba, RWKV, linear attention); the KV memory holds pages of "
            "keys and values only, so models with such layers cannot be served yet"
        )
    if isinstance(cache, CrossSpec):
        raise ModelError(
            f"layer {layer_id} attends to an encoder's output (cross attention); no request has an encoder's input "
            "yet, so models with such layers cannot be served"
        )
    if cache.dtype not in DTYPE_BYTES:
        raise ConfigError(f"KV cache dtype {cache.dtype!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
    if isinstance(cache, LatentSpec) and DTYPE_BYTES[cache.dtype] < 2:
        raise ConfigError(
            f"layer {layer_id} keeps latent vectors (multi-head latent attention), whose pages cannot be "
            f"{cache.dtype} yet; set cache.dtype to auto"
        )
    if cache.window is not None and cache.window < 1:
        raise ModelError(f"layer {layer_id} has a sliding window of {cache.window} tokens; it must be at least 1")
    return cache


def _choose_num_tensors(kind_sizes: list[int]) -> int:
    """The number of KV tensors that wastes the fewest pages; of equals the largest, which makes the fewest groups."""

    def num_groups(num_tensors: int) -> int:
        return sum(-(-size // num_tensors) for size in kind_sizes)

    def num_empty(num_tensors: int) -> int:
        return sum(-size % num_tensors for size in kind_sizes)

    largest = max(kind_sizes)
    allowed = max(MAX_GROUPS, len(kind_sizes))
    candidates = [count for count in range(min(kind_sizes), largest + 1) if num_groups(count) <= allowed]
    return min(candidates, key=lambda count: (num_empty(count), -count))


def num_blocks_for(layout: KVLayout, memory_bytes: int) -> int:
    """Blocks, the null block included, that `memory_bytes` hold on one rank."""
    return max(0, memory_bytes // max(stage_block_bytes(layout)))


def blocks_per_request(layout: KVLayout, num_tokens: int, max_num_batched_tokens: int) -> int:
    """The most blocks, over all groups, that one request of `num_tokens` tokens ever holds at a time.

    A group with window W keeps, besides the up to `max_num_batched_tokens` tokens of a step, the W - 1 before them.
    """
    total = 0
    num_new = min(num_tokens, max_num_batched_tokens)
    for group in layout.groups:
        num_blocks = layout.blocks_for(num_tokens)
        if group.window is not None:
            # A span touches one block more than it fills where it starts at the end of a block.
            num_blocks = min(num_blocks, 1 + layout.blocks_for(group.window + num_new - 2))
        total += num_blocks
    return total


def largest_model_len(layout: KVLayout, num_blocks: int, max_num_batched_tokens: int, at_most: int) -> int:
    """The longest request, up to `at_most` tokens, that `num_blocks` blocks (null block included) hold. 0: none."""
    fits, too_long = 0, at_most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if blocks_per_request(layout, middle, max_num_batched_tokens) < num_blocks:
            fits = middle
        else:
            too_long = middle
    return fits


def check_capacity(layout: KVLayout, num_blocks: int, max_model_len: int, max_num_batched_tokens: int) -> None:
    """Raises `CapacityError` where one request of `max_model_len` tokens does not fit in `num_blocks` blocks.

    The message says how much is missing and what would fit.
    """
    needed = blocks_per_request(layout, max_model_len, max_num_batched_tokens) + 1
    if num_blocks >= needed:
        return
    available = max(0, num_blocks)
    fits = largest_model_len(layout, num_blocks, max_num_batched_tokens, max_model_len)
    shorter = f"set max_model_len to {fits} or less" if fits else "not even a request of one token fits"
    raise CapacityError(
        f"KV memory is too small for one request of max_model_len {max_model_len}: it needs {needed} blocks of "
        f"{layout.block_size} tokens ({_size(needed * layout.block_bytes)}), there are {available} "
        f"({_size(available * layout.block_bytes)}), so {_size((needed - available) * layout.block_bytes)} are "
        f"missing; {shorter}, or give the KV cache at least {_size(needed * layout.block_bytes)}"
    )


def _size(num_bytes: int) -> str:
    mebibytes = num_bytes / 2**20
    return f"{mebibytes / 1024:.2f} GiB" if mebibytes >= 1024 else f"{mebibytes:.2f} MiB"
