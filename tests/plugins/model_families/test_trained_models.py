"""The native family on a trained checkpoint, in its own text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.story_model import save_story_model
from dovetail.testing.tiny_models import read_config, read_weights

STORIES = Path(__file__).resolve().parents[3] / ".." / "shared" / "models" / "stories15M" / "hf-fp16"
"""Tried too where it is."""


@pytest.fixture(params=["made", *(["stories15M"] if STORIES.is_dir() else [])])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "stories15M":
        return STORIES
    save_story_model(tmp_path)
    return tmp_path


def test_a_trained_model_tells_the_story_that_transformers_tells(checkpoint: Path) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    harness = ModelHarness(
        LlamaFamily(LlamaFamily.Options()), read_config(checkpoint), read_weights(checkpoint), ReferenceBackend
    )
    prompt = AutoTokenizer.from_pretrained(checkpoint)("Once upon a time").input_ids
    ids = torch.tensor([prompt])
    output = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert harness.generate([prompt], 48) == [output[0, len(prompt) :].tolist()]
