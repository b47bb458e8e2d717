"""The native family on a trained checkpoint, in its own text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.tiny_models import read_config, read_weights

STORIES = Path(__file__).resolve().parents[3] / ".." / "shared" / "models" / "stories15M" / "hf-fp16"


@pytest.mark.skipif(not STORIES.exists(), reason="the stories15M checkpoint is not here")
def test_stories15m_tells_the_story_that_transformers_tells() -> None:
    oracle = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval()
    harness = ModelHarness(
        LlamaFamily(LlamaFamily.Options()), read_config(STORIES), read_weights(STORIES), ReferenceBackend
    )
    prompt = [1, 9038, 2501, 263, 931]
    ids = torch.tensor([prompt])
    output = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert harness.generate([prompt], 48) == [output[0, len(prompt) :].tolist()]
