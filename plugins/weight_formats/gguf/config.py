"""GGUF metadata to the keys of Hugging Face's config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from dovetail.contracts.errors import ModelError
from dovetail.plugins.weight_formats.gguf.architectures import (
    ARCHITECTURES,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    Architecture,
)
from dovetail.plugins.weight_formats.gguf.header import Header

_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
_END_TOKENS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
)
"""Control tokens that end a text or a turn. Files name one or two ids, instruct models need all of them: llama.cpp
goes by the text as well."""
_CONTROL = 3
# Number of layers of the 27B models, the only ones whose attention scale is not head_size ** -0.5.
_GEMMA_27B_LAYERS = {GEMMA2.model_type: 46, GEMMA3.model_type: 62}


class _Metadata:
    """The header's values under the architecture's prefix."""

    def __init__(self, header: Header):
        self.header = header
        self.prefix = header.text("general.architecture") or ""

    def number(self, key: str, default: Any = None) -> Any:
        """A number, `default` where it is not given."""
        value = self.header.number(f"{self.prefix}.{key}")
        return default if value is None else value

    def required(self, key: str) -> Any:
        """A number that must be there."""
        value = self.uniform(key)
        if value is None or not 0 < value < math.inf:
            found = "lacks" if value is None else f"says {value} for"
            raise ModelError(f"{self.header.path}: the metadata {found} {self.prefix}.{key}")
        return value

    def size(self, key: str, most: int, what: str) -> int:
        """A whole number that must be there, and that the file's tensors bear out: `most`, of `what`."""
        value = self.required(key)
        if value != int(value) or value > most:
            raise ModelError(
                f"{self.header.path}: the metadata says {value} for {self.prefix}.{key}, and the file has {most} {what}"
            )
        return int(value)

    def uniform(self, key: str) -> Any:
        """A number that may be given per layer, if all layers agree."""
        full = f"{self.prefix}.{key}"
        if not isinstance(self.header.metadata.get(full), np.ndarray):
            return self.header.number(full)
        values = set(self.header.metadata[full].tolist())
        if len(values) != 1:
            raise ModelError(f"{self.header.path}: {full} differs between layers, which is not served")
        return values.pop()


def architecture_of(header: Header) -> Architecture:
    """What the file holds. Raises `ModelError` for an architecture that is not known."""
    metadata = _Metadata(header)
    found = ARCHITECTURES.get(metadata.prefix)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{header.path}: GGUF architecture {metadata.prefix!r} is not supported; supported: {known}. "
            "Use the model's safetensors checkpoint instead"
        )
    if found is LLAMA and metadata.number("expert_count"):
        return MIXTRAL
    if found is LLAMA and metadata.number("attention.sliding_window"):
        return MISTRAL
    return found


def build_config(header: Header) -> dict[str, Any]:
    """The config of the model in `header`, generation defaults under "generation_config"."""
    metadata = _Metadata(header)
    architecture = architecture_of(header)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{header.path} has no token embeddings (token_embd.weight): it is not a whole language model")
    longest = max(max(shape, default=0) for shape in shapes.values())
    num_heads = metadata.size("attention.head_count", longest, "rows in its largest tensor")
    hidden_size = metadata.size("embedding_length", longest, "rows in its largest tensor")
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.size("block_count", len(shapes), "tensors"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.uniform("attention.head_count_kv") or num_heads,
        "head_dim": _head_size(metadata, hidden_size // num_heads),
        "max_position_embeddings": metadata.required("context_length"),
        "rms_norm_eps": metadata.required("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        **_dtype(header),
        **_end_tokens(header),
    }
    if (scaling := _rope_scaling(metadata, config)) is not None:
        config["rope_scaling"] = scaling
    config["intermediate_size"] = metadata.uniform("feed_forward_length") or 0
    config.update(_particulars(architecture, metadata, config, shapes))
    return config


def _head_size(metadata: _Metadata, default: int) -> int:
    size = metadata.number("attention.key_length") or default
    if metadata.number("attention.value_length", size) != size:
        raise ModelError(f"{metadata.header.path}: heads of keys and values differ in size, which is not served")
    if metadata.number("rope.dimension_count", size) != size:
        raise ModelError(f"{metadata.header.path}: only part of each head is rotated, which is not served")
    return int(size)


def _dtype(header: Header) -> dict[str, str]:
    """The dtype of matrices where they are stored unquantized; no key where they are packed."""
    types = {tensor.type for tensor in header.tensors if len(tensor.shape) > 1}
    return {"dtype": _DTYPES[types.pop()]} if len(types) == 1 and types <= _DTYPES.keys() else {}


def _end_tokens(header: Header) -> dict[str, Any]:
    named = [header.number(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens: Sequence[str] = header.texts("tokenizer.ggml.tokens") or []
    kinds = header.numbers("tokenizer.ggml.token_type")
    if kinds is not None and len(kinds) == len(tokens):
        named += [i for i in np.flatnonzero(kinds == _CONTROL).tolist() if tokens[i] in _END_TOKENS]
    ids = list(dict.fromkeys(i for i in named if i is not None))
    bos, eos = header.number("tokenizer.ggml.bos_token_id"), header.number("tokenizer.ggml.eos_token_id")
    generation = {"bos_token_id": bos, "eos_token_id": ids or None}
    return {"bos_token_id": bos, "eos_token_id": eos, "generation_config": generation}


def _rope_scaling(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any] | None:
    factors = next((tensor for tensor in metadata.header.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        with factors.path.open("rb") as file:
            file.seek(factors.offset)
            values = np.frombuffer(file.read(factors.num_bytes), "<f4")
        return _llama3_scaling(metadata, values, float(config["rope_theta"]), int(config["head_dim"]))
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear"))
    kind = metadata.header.text(f"{metadata.prefix}.rope.scaling.type") or ("linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or not factor:
        raise ModelError(f"{metadata.header.path}: RoPE scaling {kind!r} is not served (served: linear, yarn, llama3)")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.required("rope.scaling.original_context_length"),
        "attention_factor": metadata.number("rope.scaling.yarn_attn_factor"),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _llama3_scaling(metadata: _Metadata, factors: np.ndarray, theta: float, head_size: int) -> dict[str, Any]:
    """Llama 3.1's scaling from the per-frequency divisors that it was baked into.

    All releases share the low and high factors (1, 4) and the trained length (8192); only the factor, the largest
    divisor, differs. Raises `ModelError` if the divisors were made in another way.
    """
    factor, low, high, trained = float(factors.max()), 1.0, 4.0, 8192
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    smooth = np.clip((trained / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            f"{metadata.header.path}: rope_freqs.weight is not Llama 3's RoPE scaling, which is not served"
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


def _particulars(
    architecture: Architecture, metadata: _Metadata, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Keys that only some architectures have."""
    if architecture in (GEMMA2, GEMMA3):
        return _gemma(architecture, metadata, config)
    found: dict[str, Any] = {"hidden_act": "silu"}
    if architecture is LLAMA:
        found |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    if architecture is MISTRAL:
        found["sliding_window"] = metadata.number("attention.sliding_window")
    if architecture is MIXTRAL:
        found |= {"num_local_experts": metadata.required("expert_count"), "sliding_window": None}
    if architecture.experts:
        found["num_experts_per_tok"] = metadata.required("expert_used_count")
    if architecture in (QWEN2_MOE, QWEN3_MOE):
        found |= _qwen_experts(architecture, metadata, config, shapes)
    return found


def _qwen_experts(
    architecture: Architecture, metadata: _Metadata, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    sparse = {name: shape for name, shape in shapes.items() if name.endswith(".ffn_gate_exps.weight")}
    if not sparse:
        raise ModelError(f"{metadata.header.path} has no expert tensors (ffn_gate_exps)")
    layers = {int(name.split(".")[1]) for name in sparse}
    found = {
        "num_experts": metadata.required("expert_count"),
        "moe_intermediate_size": next(iter(sparse.values()))[1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config["num_hidden_layers"]) if layer not in layers],
        "norm_topk_prob": architecture is QWEN3_MOE,
    }
    shared = shapes.get(f"blk.{min(layers)}.ffn_gate_shexp.weight")
    return found if shared is None else {**found, "shared_expert_intermediate_size": shared[0]}


def _gemma(architecture: Architecture, metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    window = metadata.number("attention.sliding_window") or None
    scalar = config["head_dim"]
    if num_layers == _GEMMA_27B_LAYERS[architecture.model_type]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "sliding_window": window,
    }
    if architecture is GEMMA3:
        found["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10000.0)
    # Every second layer of Gemma 2 and every sixth of Gemma 3 sees everything; new files may say which.
    pattern = f"{metadata.prefix}.attention.sliding_window_pattern"
    given = metadata.header.metadata.get(pattern)
    if isinstance(given, np.ndarray):
        sliding = [bool(is_sliding) for is_sliding in given[:num_layers]]
    else:
        period = metadata.header.number(pattern) or (2 if architecture is GEMMA2 else 6)
        sliding = [(layer + 1) % period != 0 for layer in range(num_layers)]
    found["layer_types"] = [
        "sliding_attention" if is_sliding and window else "full_attention" for is_sliding in sliding
    ]
    return found
