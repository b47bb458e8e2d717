"""Two ranks over gloo compute what one computes."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.plugins.model_families.deepseek import DeepseekFamily
from dovetail.plugins.model_families.gemma import GemmaFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.model_families.moe import MoEFamily
from dovetail.testing.tensor_parallel import run_over_ranks

# A single key head is copied to both ranks, and 127 tokens leave the second rank a row short.
ODD_SIZES = {"num_key_value_heads": 1, "vocab_size": 127, "attention_bias": True}


def test_two_ranks_give_the_logits_and_tokens_of_transformers(make_checkpoint: Any, prompt: list[int]) -> None:
    prompt = [token % 127 for token in prompt]
    cases = [
        (LlamaFamily, make_checkpoint("llama")),
        (LlamaFamily, make_checkpoint("llama", mlp_bias=True, tie_word_embeddings=True, **ODD_SIZES)),
        (GemmaFamily, make_checkpoint("gemma3_text")),
        (MoEFamily, make_checkpoint("qwen2_moe")),
        (MoEFamily, make_checkpoint("mixtral")),
        (DeepseekFamily, make_checkpoint("deepseek_v2")),
        (DeepseekFamily, make_checkpoint("deepseek_v3")),
    ]
    directories = [(family_class, checkpoint.directory) for family_class, checkpoint in cases]
    outcomes = run_over_ranks(directories, ReferenceBackend, prompt, num_tokens=16)
    for (_, checkpoint), ranks in zip(cases, outcomes, strict=True):
        expected = checkpoint.logits(prompt)
        for result in ranks:
            torch.testing.assert_close(result.logits, expected, rtol=0, atol=2e-5)
            assert result.tokens == checkpoint.generate(prompt, 16)
