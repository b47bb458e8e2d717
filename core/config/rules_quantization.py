"""The rule about how linear layers hold their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from dovetail.config.choose import Chosen, choose_or_none, go_without
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component
from dovetail.config.schema import AUTO, ComponentSection
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import QuantizationMethod, QuantizationNeed
from dovetail.contracts.weights import ModelFiles, WeightFormat

if TYPE_CHECKING:
    from dovetail.nn.layer_plan import LayerPlan, Served

_PATH = ("model", "quantization")


def choose_quantization(
    state: Resolution,
    family: Chosen,
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
    takes_any = cast(type[ModelFamily], family.plugin).takes_quantization
    if not is_auto and not takes_any:
        raise ConfigError(
            f"model.quantization.name {section.name!r} ({state.layered.origin('model.quantization.name')}): the model "
            f"family {family.component.name!r} brings linear layers of its own, which run unquantized; remove it"
        )
    if is_auto and not takes_any:
        go_without(state, _PATH, section, f"the model family {family.component.name!r} brings its own linear layers")
        return None, frozenset()
    if is_auto and state.config.model.dtype != AUTO:
        go_without(state, _PATH, section, "model.dtype is given: auto changes no precision")
        return None, frozenset()
    packed = _packed_formats(weight_format, files)
    need = QuantizationNeed(state.environment.device_type, dtype, packed, state.is_strict)
    if is_auto and not need.packed_formats:
        go_without(state, _PATH, section, "auto does not round weights; name a method")
        return None, frozenset()
    chosen = _Question(state, section, need, family, hf_config).ask()
    return chosen.component if chosen is not None else None, need.packed_formats


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


def _packed_formats(weight_format: WeightFormat, files: ModelFiles) -> frozenset[str]:
    reader = weight_format.open(files)
    try:
        return reader.packed_formats()
    finally:
        reader.close()


class _Question:
    """What methods are asked: whether they serve what the config asks for, and this model's layers."""

    def __init__(
        self,
        state: Resolution,
        section: ComponentSection,
        need: QuantizationNeed,
        family: Chosen,
        hf_config: Mapping[str, Any],
    ):
        self._state = state
        self._section = section
        self._need = need
        self._family = family
        self._hf_config = hf_config

    def ask(self) -> Chosen | None:
        """The method, or None where `auto` finds none. Warns of layers that stay in full precision though nobody
        asked for it, and of what the method says against itself."""
        formats = ", ".join(sorted(self._need.packed_formats))
        otherwise = f"no method can hold the checkpoint's {formats} as they are here"
        chosen = choose_or_none(self._state, _PATH, "quantization", self._section, self._against, otherwise)
        if chosen is not None:
            method = cast(type[QuantizationMethod], chosen.plugin)(chosen.options, self._need)
            if left_out := self._served(method).left_out:
                self._state.warn(f"model.quantization: {chosen.component.name} {left_out}")
            if caveat := method.caveat():
                self._state.warn(f"model.quantization: {chosen.component.name} {caveat}")
        return chosen

    def _against(self, plugin: type[QuantizationMethod], options: PluginOptions) -> Sequence[str]:
        need = self._need
        if self._section.name == AUTO and not plugin.holds & need.packed_formats:
            formats = ", ".join(sorted(need.packed_formats))
            return [f"the checkpoint's weights are {formats}, which it does not hold as they are"]
        if need.batch_invariant and not plugin.batch_invariant:
            return ["its results depend on the rows beside a row, which reproducibility: strict does not allow"]
        return plugin.check(need, options, self._state.environment) or self._against_layers(plugin(options, need))

    def _against_layers(self, method: QuantizationMethod) -> Sequence[str]:
        shapes = [layer.shape for layer in self._layers.offered(method)]
        served = self._served(method)
        return method.against_layers(shapes) or ([] if served.names else [f"it {served}"])

    def _served(self, method: QuantizationMethod) -> Served:
        from dovetail.nn.layer_plan import ask_layers  # takes torch along, which most commands do without

        layers = self._layers
        try:
            return ask_layers(layers, method, self._need.device_type)
        except TypeError as error:
            whose = f"{type(method).__module__}:{type(method).__qualname__}"
            raise PluginError(f"{whose} breaks the contract of quantization methods: {error}") from error

    @cached_property
    def _layers(self) -> LayerPlan:
        from dovetail.nn.layer_plan import plan_layers

        family = cast(type[ModelFamily], self._family.plugin)(self._family.options)
        ranks = self._state.config.executor.tensor_parallel
        return plan_layers(family, self._hf_config, tensor_parallel=ranks)
