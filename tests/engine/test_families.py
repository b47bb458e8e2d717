"""Every family through the whole engine: chunked prefill, prefix caching and little memory, against transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

NUM_TOKENS = 10
FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "phi3": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "mixtral": "moe",
    "qwen2_moe": "moe",
    "qwen3_moe": "moe",
    "llama4_text": "llama4",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "falcon": "layernorm",
    "bloom": "layernorm",
    "mpt": "layernorm",
    "gptj": "layernorm",
    "stablelm": "layernorm",
    "gpt_neox": "transformers",
    "gpt_oss": "transformers",
}
OVERRIDES = {
    "mistral": {"sliding_window": 12},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 12},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "gptj": {"rotary_dim": 8},
    "gpt_oss": {"sliding_window": 12, "num_local_experts": 4, "head_dim": 16, "initializer_range": 1.0},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_greedy_tokens_equal_transformers(tmp_path: Path, model_type: str) -> None:
    hf = save_tiny_model(tmp_path, tiny_config(model_type, **OVERRIDES.get(model_type, {})))
    draw = random.Random(1)
    shared = [draw.randrange(3, 128) for _ in range(24)]
    prompts = [shared + [draw.randrange(3, 128) for _ in range(draw.choice([3, 9, 30]))] for _ in range(8)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = hf.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    llm = LLM(
        model={"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 80},
        cache={"block_size": 4, "num_blocks": 120},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 20},
        executor={"threads": 1},
    )
    with llm:
        assert llm.engine.config.model_family.name == FAMILIES[model_type]
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert sum(output.num_cached_tokens for output in outputs) > 0
        assert llm.engine.cache_statistics().num_used_blocks == 0
