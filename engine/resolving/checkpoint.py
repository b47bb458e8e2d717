"""Rules about a checkpoint's config: plain values, and sizes that its tensors bear out.

A config comes from whoever made the checkpoint. What it says is compared with the headers of the weight files before a
model is built by it, since a single number can ask for any amount of time or memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelSize
from dovetail.contracts.weights import ModelFiles, TensorInfo, WeightFormat, WeightReader
from dovetail.engine.resolving.resolution import Resolution

_MOST_REPEATED = 1024
"""Layers, or experts, that any model may have, however its tensors are stacked."""
_MOST_BLOCKS = 2**15
"""Layers times experts, the same."""
_MOST_POSITIONS = 2**24
_SLACK = 2**24
"""Weights that a model may have and its checkpoint lack: those left out are named when it is loaded."""
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
"""Names of these tables: a text model's, and those that it has within a model for images and text."""
_TEXT_PARTS = ("", "text_config.")
_TIED = "tie_word_embeddings"
_ADAPTER = "adapter_config.json"
_COMPARED_ROWS = 1024
_SHOWN = 80


def _no_text(value: Any) -> Any:
    """The numbers are read as they are in the file, so digits in quotes are no number."""
    if isinstance(value, str):
        raise ValueError("Input should be a number, not text")
    return value


_NoText = BeforeValidator(_no_text)
_Size = Annotated[int, Field(ge=1), _NoText]
_Part = Annotated[int, Field(ge=0), _NoText]
_Sizes = _Size | list[_Size | None] | None
_Positions = Annotated[int, Field(ge=1, le=_MOST_POSITIONS), _NoText] | None
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), _NoText] | None
_Epsilon = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), _NoText] | None
_TokenIds = StrictInt | list[StrictInt] | None
_Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)] | None


class _Values(BaseModel):
    """The keys that decide how much is built and computed. All others are the model family's to judge."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    architectures: list[str] | None = None
    model_type: str | None = None
    text_config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    hidden_size: _Sizes = None
    n_embd: _Sizes = None
    d_model: _Sizes = None
    intermediate_size: _Sizes = None
    moe_intermediate_size: _Sizes = None
    shared_expert_intermediate_size: _Part | None = None
    intermediate_size_mlp: _Sizes = None
    ffn_dim: _Sizes = None
    ffn_hidden_size: _Sizes = None
    n_inner: _Sizes = None
    vocab_size: _Sizes = None
    head_dim: _Sizes = None
    num_attention_heads: _Sizes = None
    n_head: _Sizes = None
    n_heads: _Sizes = None
    num_key_value_heads: _Sizes = None
    num_hidden_layers: _Size | None = None
    n_layer: _Size | None = None
    n_layers: _Size | None = None
    num_layers: _Size | None = None
    num_experts: _Part | None = None
    num_local_experts: _Part | None = None
    n_routed_experts: _Part | None = None
    num_experts_per_tok: _Part | None = None
    max_position_embeddings: _Positions = None
    n_positions: _Positions = None
    max_seq_len: _Positions = None
    seq_length: _Positions = None
    sliding_window: _Part | None = None
    rms_norm_eps: _Epsilon = None
    layer_norm_eps: _Epsilon = None
    layer_norm_epsilon: _Epsilon = None
    rope_theta: _Positive = None
    partial_rotary_factor: _Share = None
    rope_local_base_freq: _Positive = None
    query_pre_attn_scalar: _Positive = None
    attn_logit_softcapping: _Positive = None
    final_logit_softcapping: _Positive = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    tie_word_embeddings: StrictBool | None = None
    bos_token_id: _TokenIds = None
    eos_token_id: _TokenIds = None


_DIMENSIONS = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "intermediate_size_mlp", "ffn_dim", "ffn_hidden_size", "n_inner"),
    *("vocab_size", "head_dim", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads"),
)
_NESTED = ("rope_scaling", "rope_parameters", "quantization_config")
"""Those whose own values are looked at: all of their numbers must be finite."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Stored:
    """A checkpoint's config, borne out by its tensors as far as that is known before a model is built."""

    config: Mapping[str, Any]
    num_weights: int
    """Over all tensors."""


def decoded(value: Any) -> Any:
    """Plain data with the numbers that transformers writes as {"__float__": "Infinity"} in their place."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the text model, which multimodal checkpoints nest."""
    nested = hf_config.get("text_config")
    return {**hf_config, **nested} if isinstance(nested, Mapping) else hf_config


def check_values(config: Mapping[str, Any], files: ModelFiles) -> None:
    """Raises `ModelError` for values that no model can have, whatever its tensors are: each with its key."""
    problems: dict[str, str] = {}
    for prefix, part in _parts(config):
        try:
            _Values.model_validate(part)
        except ValidationError as error:
            for issue in error.errors():
                key = str(issue["loc"][0])
                problems.setdefault(f"{prefix}{key}", f"{issue['msg']}, got {_shown(part[key])}")
        for key in _NESTED:
            problems |= _problems_within(f"{prefix}{key}", part.get(key))
    if problems:
        raise _refusal(files, [f"{key}: {text}" for key, text in problems.items()])


def _problems_within(key: str, value: Any) -> dict[str, str]:
    """Numbers that are not finite, and shares that are none, at any depth, each with its dotted key."""
    if isinstance(value, Mapping):
        items = [(f"{key}.{name}", item) for name, item in value.items()]
        return {path: text for name, item in items for path, text in _problems_within(name, item).items()}
    if isinstance(value, list):
        return {path: text for item in value for path, text in _problems_within(key, item).items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {key: f"Input should be a finite number, got {value}"}
    if key.endswith(".partial_rotary_factor") and value is not None:
        is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
        return {} if is_share else {key: f"Input should be a number above 0 and up to 1, got {_shown(value)}"}
    return {}


def compare(state: Resolution, opener: WeightFormat, files: ModelFiles, config: Mapping[str, Any]) -> Stored:
    """The config beside the checkpoint's tensors. Raises `ModelError` for sizes that they do not have."""
    if (files.path / _ADAPTER).exists():
        state.warn(
            f"{files.path} has an adapter ({_ADAPTER}) beside the model: it is left out, and the model is as it was"
        )
    reader = opener.open(files)
    try:
        infos = reader.infos()
        if problems := [problem for prefix, part in _parts(config) for problem in _too_large(prefix, part, infos)]:
            raise _refusal(files, problems)
        may_be_tied = any(part.get(_TIED) is not False for prefix, part in _parts(config) if prefix in _TEXT_PARTS)
        if may_be_tied and (names := _differing_head(reader, infos)):
            embedding, head = names
            state.warn(
                f"{files.path} stores {head} beside {embedding}, and the two differ: each is used in its own place, "
                f"whatever {_TIED} says"
            )
            config = _untied(config)
    finally:
        reader.close()
    return Stored(config, sum(math.prod(info.shape) for info in infos))


def refuse_more_than_stored(size: ModelSize, stored: Stored, files: ModelFiles) -> None:
    """Raises `ModelError` for a model that is far larger than its checkpoint: nothing is allocated for it."""
    if size.num_parameters > 2 * stored.num_weights + _SLACK:
        problem = f"it asks for {size.num_parameters:,} weights, and the checkpoint has {stored.num_weights:,}"
        raise _refusal(files, [problem])


def _refusal(files: ModelFiles, problems: Sequence[str]) -> ModelError:
    return ModelError(f"the config of {files.path} cannot be used: {'; '.join(problems)}")


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config, and those that it nests ("text_config"), each with the prefix of its keys."""
    yield "", config
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, Mapping):
            yield f"{key}.", value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _too_large(prefix: str, config: Mapping[str, Any], infos: Sequence[TensorInfo]) -> Iterator[str]:
    longest = max((length for info in infos for length in info.shape), default=0)
    for key in _DIMENSIONS:
        if (largest := _largest(config, key)) > longest:
            yield f"{prefix}{key} is {largest}, and the longest side of any tensor of the checkpoint is {longest}"
    most = max(_MOST_REPEATED, len(infos))
    for key in (*_LAYERS, *_EXPERTS):
        if (count := _largest(config, key)) > most:
            yield f"{prefix}{key} is {count}, and the checkpoint has {len(infos)} tensors"
    layers, experts = (max(_largest(config, key) for key in keys) for keys in (_LAYERS, _EXPERTS))
    if layers * experts > max(_MOST_BLOCKS, len(infos)):
        yield f"{prefix or 'it'} asks for {layers} layers of {experts} experts, more than the checkpoint can hold"


def _largest(config: Mapping[str, Any], key: str) -> int:
    """A size, the largest one where each layer has its own; 0 where it is not given."""
    value = config.get(key)
    return max((int(item) for item in (value if isinstance(value, list) else [value]) if item), default=0)


def _differing_head(reader: WeightReader, infos: Sequence[TensorInfo]) -> tuple[str, str] | None:
    """The names of the embedding and of the output layer, where the checkpoint has both and they differ. The two are
    compared row by row, so that those that differ are not read to the end."""
    shapes = {info.name: info.shape for info in infos if info.name in (*_EMBEDDINGS, *_HEADS)}
    names = [next((name for name in of_table if name in shapes), None) for of_table in (_EMBEDDINGS, _HEADS)]
    first, second = names
    if first is None or second is None or shapes[first] != shapes[second]:
        return None
    embedding, head = reader.read(first), reader.read(second)
    starts = range(0, len(embedding), _COMPARED_ROWS)
    if all(bool((embedding[row : row + _COMPARED_ROWS] == head[row : row + _COMPARED_ROWS]).all()) for row in starts):
        return None
    return first, second


def _untied(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config, and that of the text model which it may nest, with an output layer of its own."""
    text = config.get("text_config")
    nested = {"text_config": {**text, _TIED: False}} if isinstance(text, Mapping) else {}
    return {**config, **nested, _TIED: False}
