"""What one token reads and computes, counted on a module that takes no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from dovetail.contracts.kv import KVSpec, LayerCache
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import LinearKernel, LinearShape, QuantizationMethod, QuantizationNeed
from dovetail.contracts.weights import TensorInfo
from dovetail.nn import Linear, LMHead, VocabEmbedding, num_parameters
from dovetail.nn.planning import planning_context
from dovetail.plugins.commands.doctor.facts import Traffic


@dataclass(frozen=True)
class Layer:
    """One linear layer of the whole model, its fused parts together."""

    shape: LinearShape
    sources: tuple[str, ...]
    """Names of its tensors in the checkpoint."""
    is_table: bool = False
    """The token embedding, where the output layer multiplies with it."""
    is_head: bool = False
    """The output layer, which only the last prompt token needs."""

    @property
    def weights(self) -> int:
        """How many it has."""
        return self.shape.in_features * self.shape.out_features

    @property
    def is_expert(self) -> bool:
        """One of several, of which a token visits some."""
        return ".experts." in self.shape.name


@dataclass(frozen=True)
class Plan:
    """What of a model is read for each token."""

    layers: tuple[Layer, ...]
    rest: int
    """Weights of norms, routers and biases, which stay in full precision."""
    caches: tuple[LayerCache, ...]
    active_experts: float
    """Fraction of the experts that one token visits."""

    def active_weights(self, layer: Layer) -> float:
        """Those of a layer that one token needs, on average."""
        return layer.weights * (self.active_experts if layer.is_expert else 1.0)

    def operations_per_token(self) -> int:
        """Multiplications and additions for one prompt token, attention and output layer left out."""
        return int(
            2 * sum(self.active_weights(layer) for layer in self.layers if not (layer.is_head or layer.is_table))
        )

    def traffic(self, held: Mapping[str, float], block_size: int, context: int) -> Traffic:
        """`held`: bytes per weight of each layer, by name; see `bytes_held`."""
        weights = sum(self.active_weights(layer) * held[layer.shape.name] for layer in self.layers)
        rest = self.rest * held[""]
        kv = sum(_cached_bytes(cache, block_size, context) for cache in self.caches)
        return Traffic(int(weights + rest), int(kv), context, is_exact=True)


class _Note(LinearKernel):
    """Stands where a kernel would, and knows which layer that is."""

    def __init__(self, shape: LinearShape):
        self.shape = shape

    def load(self, rows: slice, weight: Any) -> None:
        raise RuntimeError("a planned model has no weights")

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("a planned model cannot run")


class _Recorder(QuantizationMethod):
    """Puts a note in every place that a method is asked about."""

    contract = (1, 1)
    embeddings = True

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        return _Note(shape)

    def bytes_per_weight(self) -> float:
        return 0.0


def plan_model(family: ModelFamily, config: Mapping[str, Any], kv_dtype: str, max_model_len: int) -> Plan:
    """Builds the model on the meta device, on one rank. For families that take quantization; raises `ModelError` as
    `ModelFamily.create`."""
    recorder = _Recorder(PluginOptions(), QuantizationNeed("cpu", "float32"))
    context = replace(planning_context(), quantization=recorder, kv_dtype=kv_dtype, max_model_len=max_model_len)
    module = family.create(config, context)
    assert isinstance(module, torch.nn.Module)
    layers = tuple(_layers(module))
    counted = {source for layer in layers for source in layer.sources}
    tables = [m for m in module.modules() if isinstance(m, VocabEmbedding)]
    unread = sum(prod(shape) for table in tables for name, shape in table.expected().items() if name not in counted)
    return Plan(
        layers=layers,
        rest=max(0, num_parameters(module) - unread - sum(layer.weights for layer in layers)),
        caches=tuple(layer.cache for layer in context.attention_layers),
        active_experts=_active_experts(config, layers),
    )


def bytes_held(
    plan: Plan, method: QuantizationMethod | None, plain: int, infos: Sequence[TensorInfo]
) -> dict[str, float]:
    """Bytes per weight of each layer by name, under "" that of everything else.

    `plain`: bytes of a weight in full precision; `infos`: the checkpoint's tensors, whose blocks a method may hold.
    """
    packed = {info.name: info for info in infos if method is not None and info.dtype in method.holds}
    return {"": float(plain)} | {layer.shape.name: _held(layer, method, plain, packed) for layer in plan.layers}


def _held(layer: Layer, method: QuantizationMethod | None, plain: int, packed: Mapping[str, TensorInfo]) -> float:
    if method is None or (layer.is_table and not method.embeddings):
        return plain
    # Memory is not touched before weights come, so creating the kernel costs nothing.
    if method.create_linear(layer.shape, torch.device("cpu")) is None:
        return plain
    if all(source in packed for source in layer.sources):
        infos = [packed[source] for source in layer.sources]
        return sum(info.num_bytes for info in infos) / sum(prod(info.shape) for info in infos)
    return method.bytes_per_weight()


def _layers(module: torch.nn.Module) -> list[Layer]:
    layers: list[Layer] = []
    for child in module.modules():
        if isinstance(child, Linear | LMHead) and isinstance(child.kernel, _Note):
            sources = tuple(name for name, shape in child.expected().items() if len(shape) == 2)
            is_head = isinstance(child, LMHead)
            # A tied output layer expects nothing of its own: its kernel is the embedding's.
            is_table = is_head and not sources
            if is_table:
                sources = (f"{child.kernel.shape.name}.weight",)
            layers.append(Layer(child.kernel.shape, sources, is_table, is_head))
    return layers


def _active_experts(config: Mapping[str, Any], layers: Sequence[Layer]) -> float:
    numbers = {layer.shape.name.partition(".experts.")[2].partition(".")[0] for layer in layers if layer.is_expert}
    chosen = config.get("num_experts_per_tok")
    return min(1.0, int(chosen) / len(numbers)) if chosen and numbers else 1.0


def _cached_bytes(cache: LayerCache, block_size: int, context: int) -> float:
    page = cache.page_bytes(block_size)
    if not isinstance(cache, KVSpec):
        return page
    tokens = context if cache.window is None else min(context, cache.window)
    return page * tokens / block_size
