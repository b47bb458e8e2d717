"""Lists a model's layers and counts their bytes, on a module without memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from dovetail.contracts.layer_plan import LayerPlan, PlannedLayer
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import (
    LayerSupport,
    LinearShape,
    LooksUpRows,
    QuantizationCapabilities,
    QuantizationMethod,
    QuantizationNeed,
)
from dovetail.contracts.weights import TensorInfo
from dovetail.nn.embedding import LMHead, VocabEmbedding
from dovetail.nn.kernels import PackedLinear
from dovetail.nn.linear import Linear
from dovetail.nn.loading import num_parameters
from dovetail.nn.planning import planning_context


class _Note(LooksUpRows):
    """Replaces a kernel and records its layer."""

    def __init__(self, shape: LinearShape):
        self.shape = shape

    def load(self, rows: slice, weight: Any) -> None:
        raise RuntimeError("a planned model has no weights")

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("a planned model cannot run")

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("a planned model cannot run")


class _Recorder(QuantizationMethod):
    """Returns a note for every layer that a method is asked about."""

    contract = (1, 0)
    capabilities = QuantizationCapabilities(embeddings=True)

    def describe(self, shape: LinearShape) -> LayerSupport:
        return LayerSupport(is_served=True)

    def create_linear(self, shape: LinearShape, device: torch.device) -> _Note:
        return _Note(shape)


def plan_layers(
    family: ModelFamily,
    config: Mapping[str, Any],
    *,
    tensor_parallel: int = 1,
    kv_dtype: str = "float32",
    max_model_len: int = 1,
    layers_held: range | None = None,
    is_first_stage: bool = True,
    is_last_stage: bool = True,
) -> LayerPlan:
    """Builds the first rank's model, or one pipeline stage of it, on the meta device and returns its layers. The family
    must serve quantization. Raises `ModelError` as `ModelFamily.create` does."""
    recorder = _Recorder(PluginOptions(), QuantizationNeed("cpu", "float32"))
    context = replace(
        planning_context(tensor_parallel),
        quantization=recorder,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        layers=layers_held,
        is_first_stage=is_first_stage,
        is_last_stage=is_last_stage,
    )
    module = family.create(config, context)
    assert isinstance(module, torch.nn.Module)
    layers = tuple(_layers(module))
    tables = tuple(_tables(module, {layer.shape.name for layer in layers}))
    return LayerPlan(
        layers=layers,
        rest=max(0, num_parameters(module) // tensor_parallel - sum(layer.weights for layer in (*layers, *tables))),
        caches=tuple(layer.cache for layer in context.attention_layers),
        active_experts=_active_experts(config, layers),
        tables=tables,
    )


def bytes_held(
    plan: LayerPlan, method: QuantizationMethod | None, plain: int, infos: Sequence[TensorInfo]
) -> dict[str, float]:
    """Returns the bytes per weight of each layer by name, and under "" of everything else.

    `plain`: bytes of a weight in full precision; `infos`: the checkpoint's tensors, whose blocks a method may hold.
    """
    held = {"": float(plain)} | {layer.shape.name: float(plain) for layer in (*plan.layers, *plan.tables)}
    if method is None:
        return held
    served = plan.ask(method).layers
    by_name = {info.name: info for info in infos}
    formats = {info.dtype for info in infos}
    for layer in plan.offered(method):
        if (support := served.get(layer.shape.name)) is not None:
            parts = [by_name[source] for source in layer.sources if source in by_name]
            # Families that rename a checkpoint's tensors hide which belong to a layer.
            held[layer.shape.name] = _held(support, parts) if parts else support.least_bytes_per_weight(formats)
    return held


def second_copies(plan: LayerPlan, method: QuantizationMethod | None, device_type: str, dtype: torch.dtype) -> int:
    """Returns the bytes of second copies of tables in full precision: a tied output layer multiplies with a copy in
    another layout, while rows are looked up in the first."""
    if not PackedLinear.serves(torch.device(device_type), dtype):
        return 0
    served = plan.ask(method).names if method is not None else frozenset()
    tied = (layer for layer in plan.layers if layer.is_table and layer.shape.name not in served)
    return sum(layer.weights for layer in tied) * dtype.itemsize


def _held(support: LayerSupport, parts: Sequence[TensorInfo]) -> float:
    """Bytes per weight of a layer whose parts have the checkpoint's form."""
    weights = [prod(info.shape) for info in parts]
    each = (support.packed_bytes_per_weight.get(info.dtype, support.bytes_per_weight) for info in parts)
    return sum(count * size for count, size in zip(weights, each, strict=True)) / sum(weights)


def _layers(module: torch.nn.Module) -> list[PlannedLayer]:
    layers: list[PlannedLayer] = []
    for child in module.modules():
        if isinstance(child, Linear | LMHead) and isinstance(child.kernel, _Note):
            sources = tuple(name for name, shape in child.expected().items() if len(shape) == 2)
            is_head = isinstance(child, LMHead)
            # A tied output layer expects nothing of its own: its kernel is the embedding's.
            is_table = is_head and not sources
            if is_table:
                sources = (f"{child.kernel.shape.name}.weight",)
            layers.append(PlannedLayer(child.kernel.shape, sources, is_table, is_head))
    return layers


def _tables(module: torch.nn.Module, tied: Collection[str]) -> list[PlannedLayer]:
    return [
        PlannedLayer(child.kernel.shape, tuple(child.expected()), is_table=True)
        for child in module.modules()
        if isinstance(child, VocabEmbedding) and isinstance(child.kernel, _Note) and child.name not in tied
    ]


def _active_experts(config: Mapping[str, Any], layers: Sequence[PlannedLayer]) -> float:
    numbers = {layer.shape.name.partition(".experts.")[2].partition(".")[0] for layer in layers if layer.is_expert}
    chosen = config.get("num_experts_per_tok")
    return min(1.0, int(chosen) / len(numbers)) if chosen and numbers else 1.0
