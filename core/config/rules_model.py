"""Rules about the model: where it is, in which format, which family builds it, its dtype and its length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config.choose import Chosen, choose
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component
from dovetail.config.rope_overrides import apply_overrides
from dovetail.config.rules_checkpoint import check_values, compare, decoded, refuse_more_than_stored
from dovetail.config.rules_quantization import choose_quantization
from dovetail.config.schema import AUTO
from dovetail.config.slots import FAMILY, SOURCE, WEIGHT_FORMAT, architectures_of
from dovetail.config.tree import nearest
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.model import ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.contracts.weights import ModelFiles, ModelSource, WeightFormat

_DTYPE = re.compile(r"b?float(16|32|64)|double|half|float|float[48]_\w+|u?int\d+|long|short|bool")
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][\w-]+):(?P<rest>.+)", re.DOTALL)


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


def choose_model(state: Resolution) -> ChosenModel:
    """Fills the slots of the section `model`, but for the operators, each with what those before it found."""
    source, files = _find_files(state)
    weight_format, opener, hf_config = _read_config(state, files)
    _refuse_quantized_checkpoint(opener, hf_config)
    stored = compare(state, opener, files, hf_config)
    dtype = choose_dtype(state, stored.config)
    family, size = _choose_family(state, stored.config, dtype)
    refuse_more_than_stored(size, stored, files)
    quantization, packed = choose_quantization(state, family, opener, files, stored.config, dtype)
    parts = source.component, weight_format.component, opener
    return ChosenModel(files, *parts, stored.config, dtype, family, size, quantization, packed)


def _find_files(state: Resolution) -> tuple[Chosen[ModelSource], ModelFiles]:
    """The model source, and the files it finds."""
    model = state.config.model
    scheme, rest = _split_scheme(state, model.path)
    section = model.source
    if scheme is not None and section.name not in (AUTO, scheme):
        origin = state.layered.origin("model.source.name")
        raise ConfigError(
            f"model.path {model.path!r} asks for the source {scheme!r}, model.source ({origin}) for "
            f"{section.name!r}; keep one"
        )
    if scheme is not None:
        section = section.model_copy(update={"name": scheme})
    rest = _anchor(state, scheme, rest, section.name)

    try:
        chosen = choose(state, SOURCE, rest, section=section)
    except ModelError as error:
        raise ModelError(_not_found(state, model.path, str(error))) from None
    if scheme is not None:
        state.decide("model.source.name", chosen.component.name, f"the scheme of {model.path!r}")
    return chosen, chosen.plugin(chosen.options).resolve(rest, model.revision)


def _split_scheme(state: Resolution, reference: str) -> tuple[str | None, str]:
    match = _SCHEME.fullmatch(reference)
    known = {entry.name for entry in state.registry.entries("model_source")}
    if match is None:
        return None, reference
    if match["scheme"] in known:
        return match["scheme"], match["rest"]
    if (state.layered.base_dir("model.path") / reference).exists() or state.config.model.source.name != AUTO:
        return None, reference
    origin = state.layered.origin("model.path")
    hint = nearest(match["scheme"], known)
    raise ConfigError(f"model.path {reference!r} ({origin}): there is no model source {match['scheme']!r}; {hint}")


def _anchor(state: Resolution, scheme: str | None, rest: str, source_name: str) -> str:
    """Makes a path absolute: it counts from the folder of the file that gave it."""
    base_dir = state.layered.base_dir("model.path")
    path = Path(rest).expanduser()
    absolute = (base_dir / path).absolute()
    # What is written like a path is one, there or not; any other word may be a path, and is one if it is there.
    if str(absolute) == rest or not (rest.startswith((".", "~")) or absolute.exists()):
        return rest
    if source_name != AUTO:
        source = state.registry.load("model_source", source_name, state.layered.base_dir("model.source.name"))
        # A hub's "org/name" stays one, even where a folder of that name lies around.
        if issubclass(source, ModelSource) and not source.recognizes(str(absolute)):
            return rest
    whole = f"{scheme}:{absolute}" if scheme is not None else str(absolute)
    state.decide("model.path", whole, f"a path, relative to {base_dir}")
    return str(absolute)


def _not_found(state: Resolution, reference: str, answers: str) -> str:
    origin = state.layered.origin("model.path")
    base_dir = state.layered.base_dir("model.path")
    return (
        f"model.path {reference!r} ({origin}): there is no such file or folder (looked in {base_dir}), and no model "
        f"source recognizes it. Write a path, or scheme:reference.\n{answers}"
    )


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
    weight_format = chosen.plugin(chosen.options)
    config = apply_overrides(decoded(weight_format.config(files)), state.config.model.hf_overrides)
    check_values(config, files)
    return chosen, weight_format, config


def _inner_model(path: Path) -> str:
    """A hint where a model lies one folder further down."""
    inner = [config.parent for config in path.glob("*/config.json")] if path.is_dir() else []
    return f" Its folder {inner[0].name} has a config.json: did you mean {inner[0]}?" if len(inner) == 1 else ""


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the text model, which multimodal checkpoints nest."""
    nested = hf_config.get("text_config")
    return {**hf_config, **nested} if isinstance(nested, Mapping) else hf_config


def choose_dtype(state: Resolution, hf_config: Mapping[str, Any]) -> str:
    """dtype of weights and activations."""
    asked = state.config.model.dtype
    if asked != AUTO:
        return asked
    declared = _declared_dtype(text_config(hf_config))
    fast = _fast_dtypes(state.environment)
    if declared not in DTYPE_BYTES:
        dtype = "bfloat16" if "bfloat16" in fast else "float32"
        reason = f"the model's config names none; {_speed(dtype, fast, state.environment)}"
    elif declared in fast:
        dtype, reason = declared, f"the model's own; {_speed(declared, fast, state.environment)}"
    else:
        # Half precision without hardware for it is slower than float32 as well as less exact.
        dtype = "float16" if "float16" in fast else "float32"
        reason = f"the model's own is {declared}; {_speed(declared, fast, state.environment)}"
    state.decide("model.dtype", dtype, reason)
    return dtype


def _declared_dtype(config: Mapping[str, Any]) -> str:
    """The config's own dtype, "" where it names none. Raises `ModelError` for one that there is not."""
    for key in ("dtype", "torch_dtype"):
        if value := config.get(key):
            name = value.removeprefix("torch.") if isinstance(value, str) else ""
            if name != "auto" and _DTYPE.fullmatch(name) is None:
                raise ModelError(f"the model's config names the {key} {value!r}, which is none; set model.dtype")
            return name
    return ""


def _fast_dtypes(environment: Environment) -> set[str]:
    """dtypes in which the device multiplies matrices at full speed."""
    fast = {"float32", "float64"}
    if environment.device_type == "cpu":
        if environment.cpu_features & {"avx512_bf16", "amx_bf16", "bf16"}:
            fast.add("bfloat16")
        if environment.cpu_features & {"avx512_fp16", "amx_fp16", "asimdhp"}:
            fast.add("float16")
        return fast
    fast.add("float16")
    if all(device.compute_capability >= (8, 0) for device in environment.devices):
        fast.add("bfloat16")
    return fast


def _speed(dtype: str, fast: set[str], environment: Environment) -> str:
    where = "this CPU" if environment.device_type == "cpu" else f"this {environment.device_type} device"
    return f"{where} has {'' if dtype in fast else 'no '}instructions for {dtype}"


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
    )
    try:
        chosen = choose(state, FAMILY, need)
    except ModelError as error:
        asked = [repr(name) for name in architectures_of(hf_config)]
        names = " or ".join(asked) or 'none (its config has no "architectures")'
        raise ModelError(
            f"the model's architecture is {names}, and no model family can build it as asked.\n{error}"
        ) from None
    return chosen, chosen.plugin(chosen.options).size(hf_config)


def _refuse_quantized_checkpoint(weight_format: WeightFormat, hf_config: Mapping[str, Any]) -> None:
    """Weights that are stored quantized need a weight format that knows how."""
    quantized = hf_config.get("quantization_config")
    if isinstance(quantized, Mapping) and quantized.get("quant_method") not in weight_format.quantizations:
        method = quantized.get("quant_method", "an unnamed method")
        raise ModelError(
            f"the checkpoint's weights are stored quantized ({method}), which {type(weight_format).__name__} cannot "
            "read; use the unquantized checkpoint (model.quantization quantizes it at load) or a GGUF file"
        )


def eos_token_ids(state: Resolution, hf_config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's, else the config's. Warns of those outside the vocabulary, which
    are left out."""
    given = _given_eos(hf_config)
    outside = [str(token_id) for token_id in given if not 0 <= token_id < vocab_size]
    if outside:
        state.warn(
            f"eos_token_id {', '.join(outside)} of the model's config is no token of the vocabulary, which has"
            f" {vocab_size}: it is left out, and never ends an output"
        )
    return tuple(token_id for token_id in given if 0 <= token_id < vocab_size)


def _given_eos(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    for config in (hf_config.get("generation_config") or {}, hf_config, text_config(hf_config)):
        found = config.get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, Sequence) and found:
            return tuple(int(token_id) for token_id in found)
    return ()


def choose_length(state: Resolution, size: ModelSize, kv_tokens: int | None) -> int:
    """Longest sequence: what is asked, or the model's own, at most what the KV memory holds (`kv_tokens`)."""
    asked = state.config.model.max_model_len
    own = size.max_model_len
    if asked is not None:
        if asked > own:
            raise ConfigError(
                f"model.max_model_len {asked} ({state.layered.origin('model.max_model_len')}) is more than the {own} "
                "positions of the model; ask for less, or extend the model with model.hf_overrides "
                "(max_position_embeddings, rope_scaling) if it stands that"
            )
        return asked
    if kv_tokens is not None and kv_tokens < own:
        if kv_tokens < 1:
            raise ConfigError(
                "the KV memory does not hold one block; give more in cache.memory_gib or cache.num_blocks"
            )
        reason = f"the KV memory holds {kv_tokens} tokens; the model has {own} positions"
        state.decide("model.max_model_len", kv_tokens, reason)
        return kv_tokens
    state.decide("model.max_model_len", own, "the model's positions")
    return own


def resolve_tokenizer(state: Resolution) -> str | None:
    """The directory of a tokenizer other than the model's own, absolute where it exists."""
    asked = state.config.model.tokenizer
    if asked is None:
        return None
    path = state.layered.base_dir("model.tokenizer") / Path(asked).expanduser()
    if not path.is_dir():
        origin = state.layered.origin("model.tokenizer")
        raise ConfigError(f"model.tokenizer {asked!r} ({origin}): there is no directory {path}")
    state.decide("model.tokenizer", str(path.absolute()), "a path, relative to the folder of the file that gives it")
    return str(path.absolute())
