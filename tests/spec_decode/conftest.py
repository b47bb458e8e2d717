"""A target that writes English, with a draft model and Medusa heads that were trained for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.testing.story_model import STORY, save_story_model

MODELS = Path(__file__).resolve().parents[2] / ".." / "shared" / "models"
NUM_HEADS = 3


@dataclass(frozen=True)
class Trained:
    """Directories with weights; prompts from which the target tells a story."""

    target: Path
    draft: Path
    medusa: Path


def fit_medusa_heads(target: Path, directory: Path) -> Path:
    """Heads of one residual block each, trained for a second on the story that the target knows."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(target)(STORY * 2).input_ids)
    with torch.inference_mode():
        states = model(tokens[None], output_hidden_states=True).hidden_states[-1][0].clone()
    size = states.shape[-1]
    tensors = {}
    torch.manual_seed(0)
    for head in range(NUM_HEADS):
        block = torch.nn.Linear(size, size)
        optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
        # The last states see least that is new; what head k guesses lies k + 2 tokens on.
        seen, wanted = states[: -2 - head].clone(), tokens[2 + head :]
        for _ in range(60):
            optimizer.zero_grad()
            logits = model.lm_head(seen + torch.nn.functional.silu(block(seen)))
            torch.nn.functional.cross_entropy(logits, wanted).backward()
            optimizer.step()
        tensors |= {f"{head}.0.linear.{name}": value.detach() for name, value in block.named_parameters()}
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1, "hidden_size": size, "original_lm_head": True}
    (directory / "config.json").write_text(json.dumps({"model_type": "medusa", **config}))
    return directory


def make_trained(directory: Path) -> Trained:
    """All three on the spot, in a few seconds."""
    for name in ("target", "draft", "medusa"):
        (directory / name).mkdir()
    save_story_model(directory / "target")
    save_story_model(directory / "draft", num_layers=1)
    return Trained(
        directory / "target", directory / "draft", fit_medusa_heads(directory / "target", directory / "medusa")
    )


REAL = Trained(MODELS / "stories15M" / "hf-fp16", MODELS / "stories15M-draft2L" / "hf", MODELS / "stories15M-medusa")
HAS_REAL = REAL.target.is_dir() and REAL.draft.is_dir() and REAL.medusa.is_dir()


@pytest.fixture(
    scope="session", params=["made", *([pytest.param("stories15M", marks=pytest.mark.nightly)] if HAS_REAL else [])]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Made on the spot; at night, where they are, models that learned from many stories as well."""
    return REAL if request.param == "stories15M" else make_trained(tmp_path_factory.mktemp("trained"))
