"""The rule about how linear layers hold their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from dovetail.config.choose import Chosen, choose_or_none, go_without
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component
from dovetail.config.schema import AUTO, ComponentSection
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.model import ModelFamily
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import QuantizationMethod, QuantizationNeed
from dovetail.contracts.weights import ModelFiles, WeightFormat

_PATH = ("model", "quantization")


def choose_quantization(
    state: Resolution, family: Chosen, weight_format: WeightFormat, files: ModelFiles, dtype: str
) -> tuple[Component | None, frozenset[str]]:
    """The quantization method, or None for full precision; and the packed formats of the checkpoint, empty where nobody
    had to know them.

    A method that the config names may round weights. `auto` changes no weight: it looks among those methods that hold a
    packed checkpoint's blocks as they are.
    """
    section = state.config.model.quantization
    if section is None:
        return None, frozenset()
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
    return _ask(state, section, need), need.packed_formats


def _packed_formats(weight_format: WeightFormat, files: ModelFiles) -> frozenset[str]:
    reader = weight_format.open(files)
    try:
        return reader.packed_formats()
    finally:
        reader.close()


def _ask(state: Resolution, section: ComponentSection, need: QuantizationNeed) -> Component | None:
    formats = ", ".join(sorted(need.packed_formats))

    def against(plugin: type[QuantizationMethod], options: PluginOptions) -> Sequence[str]:
        if section.name == AUTO and not plugin.holds & need.packed_formats:
            return [f"the checkpoint's weights are {formats}, which it does not hold as they are"]
        if need.batch_invariant and not plugin.batch_invariant:
            return ["its results depend on the rows beside a row, which reproducibility: strict does not allow"]
        return plugin.check(need, options, state.environment)

    otherwise = f"no method can hold the checkpoint's {formats} as they are here"
    chosen = choose_or_none(state, _PATH, "quantization", section, against, otherwise)
    return chosen.component if chosen is not None else None
