"""Small random adapters of saved models, as the library PEFT writes them, and models with an adapter merged into their
weights, the oracle of tests."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch

PREFIX = "base_model.model."
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EVERY_LAYER = (*PROJECTIONS, *MLP)


def save_adapter(
    directory: Path,
    model: Path,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = EVERY_LAYER,
    strength: float = 0.5,
    **config: Any,
) -> Path:
    """Writes an adapter of `model`, random by `seed`, that changes what it generates. `config`: keys of its config."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith(targets):
            continue
        out_features, in_features = weight.shape
        a = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        b = torch.randn(out_features, rank, generator=generator) * strength
        tensors |= {f"{PREFIX}{layer}.lora_A.weight": a, f"{PREFIX}{layer}.lora_B.weight": b}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(targets)}
    (directory / "adapter_config.json").write_text(json.dumps(values | config))
    return directory


def scale_of(config: dict[str, Any]) -> float:
    """The factor of B A, for adapters whose layers have one rank and one alpha."""
    rank = config["r"]
    return float(config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank))


def save_merged(directory: Path, model: Path, adapter: Path) -> Path:
    """Writes the model with W + scale B A in place of each W, in plain torch."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    scale = scale_of(json.loads((adapter / "adapter_config.json").read_text()))
    for name in [name for name in tensors if ".lora_A." in name]:
        layer = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        weights[f"{layer}.weight"] += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    directory.mkdir(parents=True)
    for file in model.glob("*.json"):
        shutil.copy(file, directory)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory
