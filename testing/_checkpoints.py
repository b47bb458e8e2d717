"""Checkpoints that the suite of weight formats writes, copies and compares with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dovetail.testing.tiny_models import read_config, read_weights

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""Of the model that `random_tensors` are of."""
_COMPARED = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Keys of a config that every format gives: those without which no model is built."""


def random_tensors() -> dict[str, torch.Tensor]:
    """All weights of a small Llama by their Hugging Face names, the same at every call: matrices in float16, norms in
    float32, which every format can hold."""
    shapes = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
        "input_layernorm": (64,),
        "post_attention_layernorm": (64,),
    }
    whole = {"model.embed_tokens": (128, 64), "model.norm": (64,), "lm_head": (128, 64)}
    whole |= {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in whole.items()}
    return {name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}


def save_safetensors(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes config.json and two files of safetensors with their index, as the Hugging Face hub has them; returns the
    folder."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    names = list(tensors)
    places = {
        name: f"model-0000{1 + (2 * place >= len(names))}-of-00002.safetensors" for place, name in enumerate(names)
    }
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def reason_against_paths(checkpoint: Path, expected: Path | None) -> str | None:
    """Why these cannot be a checkpoint and a folder of safetensors; None where they can."""
    if not checkpoint.exists():
        return f"checkpoint: there is no {checkpoint.absolute()}"
    if expected is not None and not ((expected / "config.json").is_file() and any(expected.glob("*.safetensors"))):
        return f"expected: {expected.absolute()} is no folder with config.json and safetensors files"
    return None


def copy_checkpoint(path: Path, folder: Path) -> Path:
    """Copies a checkpoint, a folder or one file, to below `folder`; returns the copy's path."""
    path = path.resolve()
    if path.is_dir():
        return Path(shutil.copytree(path, folder / path.name))
    return Path(shutil.copy(path, folder / path.name))


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and all tensors of a folder with config.json and safetensors files."""
    return read_config(folder), dict(read_weights(folder))


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a format must give of a config."""
    return {key: config[key] for key in _COMPARED if key in config}
