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
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

MODELS = Path(__file__).resolve().parents[2] / ".." / "shared" / "models"
NUM_HEADS = 3
INNER = 48


@dataclass(frozen=True)
class Trained:
    """Directories with weights; prompts from which the target tells a story."""

    target: Path
    draft: Path
    medusa: Path


class TinyPair:
    """A tiny target, another tiny model of its vocabulary, both as transformers has them, and drafters in a file."""

    def __init__(self, directory: Path, plugins: str):
        self.target, self.draft = directory / "target", directory / "draft"
        self.target_model = save_tiny_model(self.target, tiny_config("llama"))
        small = tiny_config("llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
        self.draft_model = save_tiny_model(self.draft, small, seed=1)
        self.plugins = directory / "drafters.py"
        self.plugins.write_text(plugins)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers generates."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


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


def fit_head(target: Path, directory: Path) -> Path:
    """An EAGLE-1 head for the target that guesses a little: `fc` by least squares over the target's own samples, the
    layer behind it small and random."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    size, vocab_size = model.config.hidden_size, model.config.vocab_size
    generator = torch.manual_seed(0)
    with torch.inference_mode():
        tokens = model.generate(torch.ones(32, 1, dtype=torch.int64), do_sample=True, max_new_tokens=64, min_length=64)
        states = model(tokens, output_hidden_states=True).hidden_states[-1]
        seen = torch.cat((model.get_input_embeddings()(tokens[:, 1:]), states[:, :-1]), dim=-1).flatten(0, 1)
        fc = torch.linalg.lstsq(seen, states[:, 1:].flatten(0, 1)).solution.T
    shapes = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (INNER, size), "mlp.up_proj": (INNER, size), "mlp.down_proj": (size, INNER)}
    tensors = {
        f"layers.0.{name}.weight": 0.01 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    tensors |= {"fc.weight": fc.contiguous(), "layers.0.post_attention_layernorm.weight": torch.ones(size)}
    save_file(tensors, directory / "model.safetensors")
    heads = model.config.num_attention_heads
    layer = {"hidden_size": size, "intermediate_size": INNER, "num_attention_heads": heads, "vocab_size": vocab_size}
    config = {"speculators_model_type": "eagle", "transformer_layer_config": layer}
    (directory / "config.json").write_text(json.dumps(config))
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


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Made on the spot."""
    return make_trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(
    scope="session", params=["made", *([pytest.param("stories15M", marks=pytest.mark.nightly)] if HAS_REAL else [])]
)
def trained(request: pytest.FixtureRequest) -> Trained:
    """Made on the spot; at night, where they are, models that learned from many stories as well."""
    if request.param == "stories15M":
        return REAL
    found: Trained = request.getfixturevalue("made")
    return found


def paths_of(models: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the weights of the target and of each drafter are."""
    head = fit_head(models.target, tmp_path_factory.mktemp("eagle"))
    other = tmp_path_factory.mktemp("other")
    save_story_model(other, num_layers=1, vocab_size=320)
    return {
        "target": models.target,
        "medusa": models.medusa,
        "draft_model": models.draft,
        "draft_model-shared_tokens": other,
        "eagle": head,
    }


@pytest.fixture(scope="session")
def drafter_paths(made: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`paths_of` what was made on the spot."""
    return paths_of(made, tmp_path_factory)


@pytest.fixture(scope="session")
def trained_paths(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`paths_of` each of `trained`."""
    return paths_of(trained, tmp_path_factory)
