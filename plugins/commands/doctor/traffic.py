"""What one token reads and computes."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.contracts.kv import KVSpec, LayerCache
from dovetail.contracts.layer_plan import LayerPlan, PlannedLayer
from dovetail.plugins.commands.doctor.facts import Traffic


def operations_per_token(plan: LayerPlan) -> int:
    """Multiplications and additions for one prompt token, attention and output layer left out."""
    return int(2 * sum(_active_weights(plan, layer) for layer in plan.layers if not (layer.is_head or layer.is_table)))


def traffic_of(plan: LayerPlan, held: Mapping[str, float], block_size: int, context: int) -> Traffic:
    """`held`: bytes per weight of each layer, by name; see `dovetail.nn.layer_plan.bytes_held`."""
    weights = sum(_active_weights(plan, layer) * held[layer.shape.name] for layer in plan.layers)
    rest = plan.rest * held[""]
    kv = sum(_cached_bytes(cache, block_size, context) for cache in plan.caches)
    return Traffic(int(weights + rest), int(kv), context, is_exact=True)


def _active_weights(plan: LayerPlan, layer: PlannedLayer) -> float:
    """Those of a layer that one token needs, on average."""
    return layer.weights * (plan.active_experts if layer.is_expert else 1.0)


def _cached_bytes(cache: LayerCache, block_size: int, context: int) -> float:
    page = cache.page_bytes(block_size)
    if not isinstance(cache, KVSpec):
        return page
    tokens = context if cache.window is None else min(context, cache.window)
    return page * tokens / block_size
