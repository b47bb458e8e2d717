"""The rules about a model: its files, its format, the family that builds it, and how it holds its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config.resolved import Component
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.weights import ModelFiles, WeightFormat
from dovetail.engine.resolving.checkpoint import check_values, compare, decoded, refuse_more_than_stored
from dovetail.engine.resolving.choose import Chosen, choose
from dovetail.engine.resolving.dtype import choose_dtype
from dovetail.engine.resolving.generation import with_generation_config
from dovetail.engine.resolving.quantization import choose_quantization
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.rope_overrides import apply_overrides
from dovetail.engine.resolving.score_head import split_score_head
from dovetail.engine.resolving.slots import FAMILY, WEIGHT_FORMAT, architectures_of
from dovetail.engine.resolving.source import find_files


@dataclass(frozen=True)
class ChosenModel:
    """A model, the target or one of a drafter's own, as far as it is known before a weight is read."""

    files: ModelFiles
    source: Component
    weight_format: Component
    opener: WeightFormat
    hf_config: Mapping[str, Any]
    dtype: str
    family: Chosen[ModelFamily]
    size: ModelSize
    quantization: Component | None
    packed_formats: frozenset[str]
    num_labels: int = 0
    """Of the checkpoint's score head; 0: it has none."""


def choose_model(state: Resolution) -> ChosenModel:
    """Fills the slots of the section `model`, but for the operators, each with what those before it found."""
    source, files = find_files(state)
    weight_format, opener, hf_config = _read_config(state, files)
    _refuse_quantized_checkpoint(opener, hf_config)
    hf_config, num_labels = split_score_head(state, hf_config)
    with weight_format.calling("open"):
        stored = compare(state, opener, files, hf_config)
    dtype = choose_dtype(state, stored.config)
    family, size = _choose_family(state, stored.config, dtype)
    refuse_more_than_stored(size, stored, files)
    quantization, packed = choose_quantization(state, family, opener, files, stored.config, dtype)
    parts = source.component, weight_format.component, opener
    return ChosenModel(files, *parts, stored.config, dtype, family, size, quantization, packed, num_labels)


def _read_config(state: Resolution, files: ModelFiles) -> tuple[Chosen[WeightFormat], WeightFormat, Mapping[str, Any]]:
    """The weight format, an instance of it, and the model's config with the overrides applied and its values
    checked."""
    try:
        chosen = choose(state, WEIGHT_FORMAT, files)
    except ModelError as error:
        raise ModelError(
            f"model.path ({state.layered.origin('model.path')}): {files.path} is no model; there is no config.json, "
            f"*.safetensors or *.gguf that can be used.{_inner_model(files.path)}\n{error}"
        ) from None
    with chosen.calling("config"):
        weight_format = chosen.plugin(chosen.options)
        stored = weight_format.config(files)
    config = with_generation_config(state, apply_overrides(decoded(stored), state.config.model.hf_overrides))
    check_values(config, files)
    return chosen, weight_format, config


def _inner_model(path: Path) -> str:
    """A hint where a model lies one folder further down."""
    inner = [config.parent for config in path.glob("*/config.json")] if path.is_dir() else []
    return f" Its folder {inner[0].name} has a config.json: did you mean {inner[0]}?" if len(inner) == 1 else ""


def _choose_family(
    state: Resolution, hf_config: Mapping[str, Any], dtype: str
) -> tuple[Chosen[ModelFamily], ModelSize]:
    """The model family that builds the config's architecture, and the model's sizes."""
    need = ModelNeed(
        config=hf_config,
        tensor_parallel=state.config.executor.tensor_parallel,
        device_type=state.environment.device_type,
        dtype=dtype,
        pipeline_parallel=state.config.executor.pipeline_parallel,
        batch_invariant=state.is_strict,
        adapters=state.config.lora.enabled,
    )
    try:
        chosen = choose(state, FAMILY, need)
    except ModelError as error:
        asked = [repr(name) for name in architectures_of(hf_config)]
        names = " or ".join(asked) or 'none (its config has no "architectures")'
        raise ModelError(
            f"the model's architecture is {names}, and no model family can build it as asked.\n{error}"
        ) from None
    with chosen.calling("size"):
        size = chosen.plugin(chosen.options).size(hf_config)
        if not isinstance(size, ModelSize):
            raise TypeError(f"it returned {size!r}: return a ModelSize")
    return chosen, size


def _refuse_quantized_checkpoint(weight_format: WeightFormat, hf_config: Mapping[str, Any]) -> None:
    """Weights that are stored quantized need a weight format that knows how."""
    quantized = hf_config.get("quantization_config")
    if isinstance(quantized, Mapping) and quantized.get("quant_method") not in weight_format.quantizations:
        method = quantized.get("quant_method", "an unnamed method")
        raise ModelError(
            f"the checkpoint's weights are stored quantized ({method}), which {type(weight_format).__name__} cannot "
            "read; use the unquantized checkpoint (model.quantization quantizes it at load) or a GGUF file"
        )
