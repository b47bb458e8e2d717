"""Small random checkpoints of every architecture, made on the spot by Hugging Face transformers.

`tiny_config("llama", ...)` is a config of a few thousand parameters, `save_tiny_model` writes config.json and
safetensors as `save_pretrained` does, `tiny_model` hands back the transformers model itself, the oracle of tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}

_EXTRA: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 3},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "llama4_text": {
        "head_dim": 16,
        "num_hidden_layers": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "floor_scale": 6,
    },
    "deepseek_v2": _DEEPSEEK | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "deepseek_v3": _DEEPSEEK | {"first_k_dense_replace": 1, "num_mtp_layers": 0},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16},
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A transformers config of `model_type` ("llama", "qwen3", "gemma2", ...) with tiny sizes; keys that the
    architecture spells otherwise, and all others, can be given."""
    from transformers import AutoConfig

    values = _SIZES | _EXTRA.get(model_type, {}) | overrides
    return AutoConfig.for_model(model_type, **values)


def tiny_wrapper_config(model_type: str, text_type: str, **overrides: Any) -> Any:
    """A config of `model_type` ("gemma3", "llava", ...), a model for images around a text model of `text_type`, for
    which `overrides` are."""
    from transformers import AutoConfig

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32}
    text = _SIZES | _EXTRA.get(text_type, {}) | overrides | {"model_type": text_type}
    whole = {"text_config": text, "vision_config": vision | sizes}
    if "tie_word_embeddings" in overrides:
        whole["tie_word_embeddings"] = overrides["tie_word_embeddings"]
    return AutoConfig.for_model(model_type, **whole)


def tiny_model(config: Any, seed: int = 0) -> Any:
    """The random float32 transformers model of a config, in eval mode, with eager attention.

    Weights are wider than a fresh model's, norms are not all ones and embeddings are small compared with what layers
    add to them, so that greedy text does not repeat itself and no two layers are alike.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    of_images: Any = "vision_config" in config.sub_configs
    create: Any = (AutoModelForImageTextToText if of_images else AutoModelForCausalLM).from_config
    model = create(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
        model.get_input_embeddings().weight.mul_(0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def save_tiny_model(directory: Path, config: Any, seed: int = 0) -> Any:
    """Writes the checkpoint of `tiny_model` to `directory` and returns the model."""
    model = tiny_model(config, seed)
    model.save_pretrained(directory)
    return model


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a saved model."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def read_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the safetensors files of a saved model."""
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def old_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 wrote it: rope_theta and rope_scaling in place of rope_parameters."""
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    given = config["rope_parameters"]
    if "full_attention" in given:
        old["rope_local_base_freq"] = given["sliding_attention"]["rope_theta"]
        given = given["full_attention"]
    old["rope_theta"] = given["rope_theta"]
    scaling = {key: value for key, value in given.items() if key != "rope_theta"}
    old["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
    return old
