"""Families whose building blocks run on the native set, through the whole engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.nn import native
from dovetail.plugins.operators.native.operators import SOURCE
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

NUM_TOKENS = 8
NATIVE = "dovetail.plugins.operators.native:NativeOperators"


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "qwen2_moe"])
def test_greedy_tokens_equal_transformers(tmp_path: Path, model_type: str) -> None:
    if reasons := native.reasons_against(SOURCE):
        pytest.skip(" ".join(reasons))
    hf = save_tiny_model(tmp_path, tiny_config(model_type))
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 128) for _ in range(length)] for length in (1, 30, 7)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = hf.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    model = {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32", "operators": NATIVE}
    with LLM(model=model, cache={"num_blocks": 200}, executor={"threads": 1}) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == expected
