"""Rotary position embedding (Su et al. 2021, RoFormer) and its extensions to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelContext
from dovetail.contracts.operators import Operators


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """The rotation that a model's config asks for."""

    head_size: int
    rotary_size: int
    """Leading elements of each head that are rotated; even."""
    theta: float
    max_position_embeddings: int
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """The keys that `kind` reads, spelled as in config.json's rope_parameters (or rope_scaling)."""


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines at one step's positions, made once per forward pass and used by every layer."""

    cos: torch.Tensor
    """[T, 1, rotary_size]."""
    sin: torch.Tensor
    """[T, 1, rotary_size], its first half negated: the sign of "rotate half" is folded in."""
    operators: Operators

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates heads x [T, H, head_size]; element i is paired with i + rotary_size / 2 (NeoX order).

        The result may use x's memory. Rounds as x * cos + rotate_half(x) * sin does in x's dtype.
        """
        return self.operators.rotate(x, self.cos, self.sin)


def halves_from_pairs(weight: torch.Tensor, head_size: int, rotary_size: int) -> torch.Tensor:
    """Reorders rows [heads * head_size, ...] of a projection to queries or keys whose checkpoint pairs neighbouring
    elements of a head (2 i with 2 i + 1) into the order that `Rotation` pairs. Scores do not change, since queries and
    keys are reordered alike."""
    heads = weight.view(-1, head_size, *weight.shape[1:])
    pairs = heads[:, :rotary_size].reshape(len(heads), -1, 2, *weight.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, heads[:, rotary_size:]), dim=1).view(weight.shape)


class RotaryEmbedding(torch.nn.Module):
    """Table of cosines and sines for positions 0 .. max_model_len - 1.

    The table is computed in float32 and kept in the model's dtype. Raises `ModelError` for an unknown kind of scaling,
    and for parameters that lack a key.
    """

    def __init__(self, context: ModelContext, spec: RopeSpec):
        super().__init__()
        if spec.rotary_size < 2 or spec.rotary_size % 2:
            raise ModelError(
                f"RoPE turns pairs of elements: {spec.rotary_size} of each head's {spec.head_size} cannot be rotated"
            )
        frequencies, factor = inverse_frequencies(spec, context.max_model_len)
        angles = torch.arange(context.max_model_len, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        self._operators = context.operators
        self._table = table[:, :, None, :].to(device=context.device, dtype=context.dtype)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Returns the rotation at positions int64 [T]."""
        cos, sin = self._operators.take_rows(self._table, positions).unbind(1)
        return Rotation(cos, sin, self._operators)


Scaling = Callable[[RopeSpec, int], tuple[torch.Tensor, float]]


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Returns float32 [rotary_size / 2], radians per position, and the factor of cosines and sines."""
    scalings: dict[str, Scaling] = {
        "default": lambda spec, _: (_plain(spec), 1.0),
        "linear": lambda spec, _: (_plain(spec) / spec.scaling["factor"], 1.0),
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
        "su": _longrope,
    }
    if spec.kind not in scalings:
        raise ModelError(f"RoPE scaling {spec.kind!r} is not known here; known are {', '.join(scalings)}")
    _check_numbers(spec)
    try:
        return scalings[spec.kind](spec, max_model_len)
    except KeyError as error:
        raise ModelError(f"RoPE scaling {spec.kind!r} needs the key {error} in rope_parameters") from None


def _check_numbers(spec: RopeSpec) -> None:
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        value = spec.scaling.get(key)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ModelError(f"RoPE scaling {spec.kind!r}: {key} must be a number above 0, got {value!r}")
    if spec.theta <= 0:
        raise ModelError(f"rope_theta must be a number above 0, got {spec.theta!r}")


def _plain(spec: RopeSpec) -> torch.Tensor:
    return 1.0 / _periods(spec)


def _periods(spec: RopeSpec) -> torch.Tensor:
    exponents = torch.arange(0, spec.rotary_size, 2, dtype=torch.float32) / spec.rotary_size
    return torch.as_tensor(spec.theta**exponents, dtype=torch.float32)


def _dynamic(spec: RopeSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Dynamic NTK: rotations change with the length of the sequence, so cached keys would have to be rotated again;
    below the trained length it equals plain RoPE."""
    if max_model_len > spec.max_position_embeddings:
        raise ModelError(
            f"dynamic RoPE scaling turns all keys anew as a sequence grows past {spec.max_position_embeddings} "
            f"tokens, which a KV cache cannot follow; set model.max_model_len to {spec.max_position_embeddings} or less"
        )
    return _plain(spec), 1.0


def _llama3(spec: RopeSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor = spec.scaling["factor"]
    low, high = spec.scaling["low_freq_factor"], spec.scaling["high_freq_factor"]
    trained = spec.scaling["original_max_position_embeddings"]
    frequencies = _plain(spec)
    wavelengths = 2 * math.pi / frequencies
    blend = (trained / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > trained / low, frequencies / factor, frequencies)
    between = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(between, blended, scaled), 1.0


def _yarn(spec: RopeSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, section 3.2): dimensions that turn often keep their frequency, those that turn rarely
    are interpolated, with a linear ramp between, and attention is sharpened by a temperature."""
    trained = spec.scaling["original_max_position_embeddings"]
    factor = spec.scaling["factor"] or spec.max_position_embeddings / trained
    periods = _periods(spec)

    def dimension_turning(rotations: float) -> float:
        ratio = trained / (rotations * 2 * math.pi)
        return spec.rotary_size * math.log(ratio) / (2 * math.log(spec.theta))

    low = dimension_turning(spec.scaling.get("beta_fast") or 32)
    high = dimension_turning(spec.scaling.get("beta_slow") or 1)
    if spec.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_size - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(spec.rotary_size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return frequencies, _yarn_temperature(spec.scaling, factor)


def _longrope(spec: RopeSpec, max_model_len: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al. 2024, section 3): each dimension has its own factor, from one list for contexts of the
    trained length and from another for longer ones. The engine's longest context decides, for sequences of any length,
    since cached keys cannot be rotated again when a sequence exceeds the trained length."""
    trained = spec.scaling["original_max_position_embeddings"]
    name = "long_factor" if max_model_len > trained else "short_factor"
    factors = torch.as_tensor(spec.scaling[name], dtype=torch.float32)
    if factors.shape != (spec.rotary_size // 2,):
        raise ModelError(f"RoPE scaling 'longrope': {name} needs {spec.rotary_size // 2} numbers, got {len(factors)}")
    factor = spec.scaling.get("factor") or spec.max_position_embeddings / trained
    given = spec.scaling.get("attention_factor")
    if given is not None:
        temperature = float(given)
    else:
        temperature = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return 1.0 / (factors * _periods(spec)), temperature


def _yarn_temperature(scaling: Mapping[str, Any], factor: float) -> float:
    """Factor on cosines and sines: the paper's 0.1 ln(s) + 1, or the ratio that DeepSeek's mscale keys ask for."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
