"""The rule about how linear layers hold their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from dovetail.config.choose import Chosen, Question, go_without
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component
from dovetail.config.schema import AUTO, ComponentSection
from dovetail.config.slots import QUANTIZATION
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.layer_plan import LayerPlan, Served
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import QuantizationMethod, QuantizationNeed
from dovetail.contracts.weights import ModelFiles, TensorInfo, WeightFormat


def choose_quantization(
    state: Resolution,
    family: Chosen[ModelFamily],
    weight_format: WeightFormat,
    files: ModelFiles,
    hf_config: Mapping[str, Any],
    dtype: str,
) -> tuple[Component | None, frozenset[str]]:
    """The quantization method, or None for full precision; and the packed formats of the checkpoint, empty where nobody
    had to know them.

    A method that the config names may round weights. `auto` changes no weight: it looks among those methods that hold a
    packed checkpoint's blocks as they are.
    """
    section = state.config.model.quantization
    if section is None:
        return None, frozenset()
    section = _own_format_as_auto(state, section, weight_format, hf_config)
    is_auto = section.name == AUTO
    takes_any = family.plugin.capabilities.quantization
    if not is_auto and not takes_any:
        raise ConfigError(
            f"model.quantization.name {section.name!r} ({state.layered.origin('model.quantization.name')}): the model "
            f"family {family.component.name!r} brings linear layers of its own, which run unquantized; remove it"
        )
    packed = _packed_tensors(weight_format, files)
    if is_auto and (reason := _why_auto_goes_without(state, family, takes_any, packed)) is not None:
        go_without(state, QUANTIZATION.path, section, reason)
        _warn_of_packed(state, packed, None, dtype, can_name=takes_any)
        return None, frozenset()
    formats = frozenset(info.dtype for info in packed)
    need = QuantizationNeed(state.environment.device_type, dtype, formats, state.is_strict)
    chosen = _Layers(state, section, need, family, hf_config).choose()
    _warn_of_packed(state, packed, chosen, dtype, can_name=True)
    return chosen.component if chosen is not None else None, formats


def _own_format_as_auto(
    state: Resolution, section: ComponentSection, weight_format: WeightFormat, hf_config: Mapping[str, Any]
) -> ComponentSection:
    """`auto` where the config names the format in which the checkpoint's weights stand, as vLLM's users do, and no
    method has that name."""
    name = section.name
    if name not in weight_format.quantizations or any(e.name == name for e in state.registry.entries("quantization")):
        return section
    own = (hf_config.get("quantization_config") or {}).get("quant_method")
    if own != name:
        raise ConfigError(
            f"model.quantization.name {name!r} ({state.layered.origin('model.quantization.name')}) is a format of"
            f" checkpoints, which are recognized by themselves, and this checkpoint's weights are"
            f" {'unquantized' if own is None else own}: remove it, or name a method that `dovetail plugins list` has"
        )
    return ComponentSection(name=AUTO, **section.options)


def _why_auto_goes_without(
    state: Resolution, family: Chosen[ModelFamily], takes_any: bool, packed: Sequence[TensorInfo]
) -> str | None:
    """Why no method is asked; None: they are."""
    if not takes_any:
        return f"the model family {family.component.name!r} brings its own linear layers"
    if state.config.model.dtype != AUTO:
        return "model.dtype is given: auto changes no precision"
    return None if packed else "auto does not round weights; name a method"


def _packed_tensors(weight_format: WeightFormat, files: ModelFiles) -> list[TensorInfo]:
    """Those that come in blocks."""
    reader = weight_format.open(files)
    try:
        formats = reader.packed_formats()
        return [info for info in reader.infos() if info.dtype in formats and len(info.shape) == 2]
    finally:
        reader.close()


def _warn_of_packed(
    state: Resolution,
    packed: Sequence[TensorInfo],
    chosen: Chosen[QuantizationMethod] | None,
    dtype: str,
    *,
    can_name: bool,
) -> None:
    """Tells of tensors that the checkpoint packs and that are not held so: what they take in the file, and here.
    `can_name`: the config could name a method."""
    method = chosen.plugin if chosen is not None else None
    other = [info for info in packed if method is None or info.dtype not in method.holds]
    if not other:
        return
    num_weights = sum(prod(info.shape) for info in other)
    in_file = sum(info.num_bytes for info in other)
    formats = ", ".join(sorted({info.dtype for info in other}))
    tensors = f"{len(other)} tensors in {formats}, {_gib(in_file)} in the checkpoint"
    if chosen is not None and method is not None and not method.holds:
        need = QuantizationNeed(state.environment.device_type, dtype, frozenset(info.dtype for info in packed))
        held = method(chosen.options, need).bytes_per_weight() * num_weights
        state.warn(
            f"model.quantization: {chosen.component.name} rounds anew {tensors}: about {_gib(held)} here. auto holds "
            "them as they are, where a method can do that"
        )
        return
    held = num_weights * DTYPE_BYTES[dtype]
    advice = "; a method that is named in model.quantization would round them anew, and hold less" if can_name else ""
    state.warn(f"model.quantization: {tensors}, are written out in {dtype}: {_gib(held)} here{advice}")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class _Layers:
    """Asks methods whether they serve what the config asks for, and this model's layers."""

    state: Resolution
    section: ComponentSection
    need: QuantizationNeed
    family: Chosen[ModelFamily]
    hf_config: Mapping[str, Any]

    def choose(self) -> Chosen[QuantizationMethod] | None:
        """The method, or None where `auto` finds none. Warns of layers that stay in full precision though nobody
        asked for it, and of what the method says against itself."""
        formats = ", ".join(sorted(self.need.packed_formats))
        otherwise = f"no method can hold the checkpoint's {formats} as they are here"
        question = Question(self.state, QUANTIZATION, self.need, section=self.section, ask=self._against)
        chosen = question.choose_or_none(otherwise)
        if chosen is not None:
            method = chosen.plugin(chosen.options, self.need)
            if left_out := self._served(method).left_out:
                self.state.warn(f"model.quantization: {chosen.component.name} {left_out}")
            if caveat := method.caveat():
                self.state.warn(f"model.quantization: {chosen.component.name} {caveat}")
        return chosen

    def _against(self, plugin: type[QuantizationMethod], options: PluginOptions) -> Sequence[str]:
        against = reasons_against(plugin, self.need, options, self.state.environment)
        return against or self._against_layers(plugin(options, self.need))

    def _against_layers(self, method: QuantizationMethod) -> Sequence[str]:
        shapes = [layer.shape for layer in self._layers.offered(method)]
        served = self._served(method)
        return method.against_layers(shapes) or ([] if served.names else [f"it {served}"])

    def _served(self, method: QuantizationMethod) -> Served:
        layers = self._layers
        try:
            return layers.ask(method, self.need.device_type)
        except TypeError as error:
            whose = f"{type(method).__module__}:{type(method).__qualname__}"
            raise PluginError(f"{whose} breaks the contract of quantization methods: {error}") from error

    @cached_property
    def _layers(self) -> LayerPlan:
        family = self.family.plugin(self.family.options)
        ranks = self.state.config.executor.tensor_parallel
        return self.state.inspector.plan_layers(family, self.hf_config, ranks)
