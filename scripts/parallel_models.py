"""The small models, heads and adapters that scripts/parallel_pairs.py runs: random weights, written on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dovetail.testing.tiny_adapters import save_adapter
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

_NUM_LAYERS = 4


def write_models(folder: Path) -> None:
    """Writes `model` (a Llama of four layers with a tokenizer), `new` (another of its shape), `draft`, `adapter`,
    `medusa`, `eagle` and `deepseek` (with a module for multi-token prediction) into `folder`."""
    for name, num_layers in (("model", _NUM_LAYERS), ("new", _NUM_LAYERS), ("draft", 1)):
        config = tiny_config("llama", num_hidden_layers=num_layers, max_position_embeddings=512, eos_token_id=2)
        model = save_tiny_model(folder / name, config, seed=num_layers + len(name))
        _tokenizer(config.vocab_size).save(str(folder / name / "tokenizer.json"))
    save_adapter(folder / "adapter", folder / "model", seed=3)
    _write_medusa(folder / "medusa", config.hidden_size)
    _write_eagle(folder / "eagle", model.config)
    _write_predicting(folder / "deepseek")


def _tokenizer(vocab_size: int) -> Any:
    """Printable ASCII, and numbered words up to the size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocabulary = [*letters, "\u0120", "\u010a", *(f"word{n}" for n in range(vocab_size))][:vocab_size]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * shape[-1] ** -0.5


def _write_medusa(folder: Path, hidden_size: int) -> None:
    folder.mkdir()
    tensors = {}
    for k in range(3):
        tensors[f"{k}.0.linear.weight"] = _random(hidden_size, hidden_size) * 0.4
        tensors[f"{k}.0.linear.bias"] = torch.zeros(hidden_size)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    save_file({"token_ids": torch.arange(0, 128, 2)}, folder / "draft_vocabulary.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))


def _write_eagle(folder: Path, target: Any) -> None:
    """EAGLE-1, in the names of the `speculators` format."""
    folder.mkdir()
    size, inner = target.hidden_size, target.intermediate_size
    head = size // target.num_attention_heads
    layer = {
        name: getattr(target, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "rms_norm_eps",
        )
    }
    config = {"model_type": "llama", "num_hidden_layers": 1} | layer
    tensors = {
        "fc.weight": _random(size, 2 * size),
        "layers.0.self_attn.q_proj.weight": _random(target.num_attention_heads * head, size),
        "layers.0.self_attn.k_proj.weight": _random(target.num_key_value_heads * head, size),
        "layers.0.self_attn.v_proj.weight": _random(target.num_key_value_heads * head, size),
        "layers.0.self_attn.o_proj.weight": _random(size, target.num_attention_heads * head),
        "layers.0.mlp.gate_proj.weight": _random(inner, size),
        "layers.0.mlp.up_proj.weight": _random(inner, size),
        "layers.0.mlp.down_proj.weight": _random(size, inner),
        "layers.0.post_attention_layernorm.weight": torch.ones(size),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"speculators_model_type": "eagle", "transformer_layer_config": config})
    )


def _write_predicting(folder: Path) -> None:
    """A DeepSeek-V3 with a module behind its layers that predicts the token after the next."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    main: Any = save_tiny_model(folder, tiny_config("deepseek_v3"))
    size, num_layers = main.config.hidden_size, main.config.num_hidden_layers
    layer: Any = DeepseekV3DecoderLayer(main.config, num_layers)
    prefix = f"model.layers.{num_layers}."
    tensors = {
        f"{prefix}{name}": torch.ones_like(value) if "norm" in name else _random(*value.shape)
        for name, value in layer.state_dict().items()
    }
    tensors |= {f"{prefix}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    copies = {"embed_tokens": main.model.embed_tokens, "shared_head.head": main.lm_head}
    tensors |= {f"{prefix}{name}.weight": part.weight.detach().clone() for name, part in copies.items()}
    tensors[f"{prefix}eh_proj.weight"] = _random(size, 2 * size)
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
