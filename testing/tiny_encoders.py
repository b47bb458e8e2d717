"""Small random checkpoints of encoders, made on the spot by Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dovetail.testing.tiny_models import tiny_config


def tiny_encoder(model_type: str = "bert", seed: int = 0, **overrides: Any) -> Any:
    """The random float32 transformers encoder of a `tiny_config`, in eval mode. Its weights are wider than a fresh
    model's and its norms are not all ones, so that no two tokens have nearly the same states."""
    from transformers import AutoModel

    config = tiny_config(model_type, **{"pad_token_id": 0} | overrides)
    model: Any = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
    return model


def save_tiny_encoder(directory: Path, model_type: str = "bert", seed: int = 0, **overrides: Any) -> Any:
    """Writes the checkpoint of `tiny_encoder` to `directory` and returns the model."""
    model = tiny_encoder(model_type, seed, **overrides)
    model.save_pretrained(directory)
    return model


__all__ = ["save_tiny_encoder", "tiny_encoder"]
