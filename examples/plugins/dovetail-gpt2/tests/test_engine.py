"""In an engine: found by the checkpoint's architecture, and token for token what transformers generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import DovetailError

PROMPTS = [list(range(3, 40)), [7], [100, 3, 5] * 9, [*range(3, 40), 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Greedy = Callable[[Sequence[int], int], list[int]]


def sections(path: Path, **changes: Any) -> dict[str, Any]:
    """A config with small steps and few blocks: prompts in chunks, shared prefixes, preemption. `changes` go into its
    sections."""
    own: dict[str, Any] = {
        "model": {"path": str(path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
        "cache": {"block_size": 8, "num_blocks": 20},
        "executor": {"name": "cpu", "threads": 1},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 16},
    }
    merged = {name: own[name] | changes.get(name, {}) for name in own}
    return {**changes, **merged}


def tokens(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="chunks and shared prefixes"),
        pytest.param({"scheduler": {"max_num_batched_tokens": 256}}, id="whole prompts"),
        pytest.param({"reproducibility": "strict"}, id="strict"),
        pytest.param(
            {"speculative": {"drafters": {"lookup": {"name": "ngram", "num_tokens": 3}}, "default": "lookup"}},
            id="speculation",
        ),
        pytest.param({"executor": {"name": "multiproc", "tensor_parallel": 2}}, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    saved: tuple[Path, Any], greedy: Greedy, changes: dict[str, Any]
) -> None:
    expected = [greedy(prompt, 12) for prompt in PROMPTS]
    with LLM(**sections(saved[0], **changes)) as llm:
        assert llm.engine.config.model_family.name == "gpt2"
        assert tokens(llm) == expected
        assert tokens(llm) == expected, "with the prefix cache of the first turn"


def test_the_last_position_is_used(saved: tuple[Path, Any], greedy: Greedy) -> None:
    """A request that fills all positions; one more is refused."""
    prompt = [5 + number % 100 for number in range(244)]
    with LLM(**sections(saved[0], model={"max_model_len": 256}, cache={"num_blocks": 60})) as llm:
        assert tokens(llm, [prompt]) == [greedy(prompt, 12)]
    with pytest.raises(DovetailError, match="257"):
        LLM(**sections(saved[0], model={"max_model_len": 257}))


def test_its_layers_can_be_quantized(saved: tuple[Path, Any]) -> None:
    with LLM(**sections(saved[0], model={"quantization": "q8"})) as llm:
        assert [len(found) for found in tokens(llm)] == [12] * len(PROMPTS)


def test_the_names_of_the_first_checkpoints_are_read(saved: tuple[Path, Any], greedy: Greedy, tmp_path: Path) -> None:
    """Without "transformer." in front, and with the causal masks as tensors."""
    (tmp_path / "config.json").write_text((saved[0] / "config.json").read_text())
    weights = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(saved[0] / "model.safetensors").items()
    }
    masks = {f"h.{index}.attn.bias": torch.ones(1, 1, 256, 256).tril() for index in range(2)}
    save_file(weights | masks, tmp_path / "model.safetensors")
    with LLM(**sections(tmp_path)) as llm:
        assert tokens(llm) == [greedy(prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('"add_cross_attention": true', "cross_attention"),
        ('"n_head": 5', "does not divide by 5"),
        ('"activation_function": "unheard"', "unheard"),
    ],
)
def test_what_is_not_served_is_refused(saved: tuple[Path, Any], tmp_path: Path, change: str, said: str) -> None:
    """Before a weight is read: there are none here."""
    whole = (saved[0] / "config.json").read_text().rstrip().rstrip("}").rstrip()
    (tmp_path / "config.json").write_text(f"{whole},\n{change}}}")
    (tmp_path / "model.safetensors").write_bytes((saved[0] / "model.safetensors").read_bytes())
    with pytest.raises(DovetailError, match=said):
        LLM(**sections(tmp_path, model={"family": "gpt2"}))
