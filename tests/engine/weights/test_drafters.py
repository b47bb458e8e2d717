"""Drafters get new weights too: they guess as those of a fresh engine do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ModelError, RequestError
from tests.engine.weights.conftest import PROMPTS, send

PARAMS = SamplingParams(temperature=0, max_tokens=24)


def rounds(llm: LLM) -> list[Any]:
    """Tokens, and what was drafted and accepted on the way."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.metrics.num_drafted, o.metrics.num_accepted) for o in outputs]


def speculative(**drafter: Any) -> dict[str, Any]:
    return {"speculative": {"drafters": {"mine": {"num_tokens": 3, "length": "fixed", **drafter}}}}


def test_a_draft_model(
    make: Callable[..., LLM], checkpoints: Mapping[str, Path], new_weights: Mapping[str, torch.Tensor]
) -> None:
    """The target and its drafter in one update: each of the drafter's guesses stands then."""
    llm = make(**speculative(name="draft_model", path=str(checkpoints["old"])))
    assert all(accepted == drafted for _, drafted, accepted in rounds(llm))
    send(llm, new_weights)
    stale = rounds(llm)
    llm.start_weight_update()
    for name, tensor in new_weights.items():
        llm.update_weights({"weights": {name: tensor}}, drafter="mine")
    llm.finish_weight_update()
    updated = rounds(llm)
    assert updated == rounds(make("new", **speculative(name="draft_model", path=str(checkpoints["new"]))))
    assert [tokens for tokens, *_ in updated] == [tokens for tokens, *_ in stale]
    assert sum(accepted for *_, accepted in updated) > sum(accepted for *_, accepted in stale)


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Medusa heads of two kinds, which share the target's unembedding for some tokens."""
    folder = tmp_path_factory.mktemp("heads")
    for seed, name in enumerate(("old", "new")):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for k in range(3):
            tensors[f"{k}.0.linear.weight"] = torch.randn(64, 64, generator=generator) * 0.05
            tensors[f"{k}.0.linear.bias"] = torch.randn(64, generator=generator) * 0.05
        (folder / name).mkdir()
        save_file(tensors, folder / name / "medusa_lm_head.safetensors")
        save_file({"token_ids": torch.arange(0, 128, 2)}, folder / name / "draft_vocabulary.safetensors")
        (folder / name / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    return {name: folder / name for name in ("old", "new")}


def test_medusa_heads(
    make: Callable[..., LLM], heads: Mapping[str, Path], new_weights: Mapping[str, torch.Tensor]
) -> None:
    """With the target, whose unembedding they copied."""
    llm = make(**speculative(name="medusa", path=str(heads["old"])))
    rounds(llm)
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"weights": dict(new_weights)})
    llm.update_weights({"weights": load_file(heads["new"] / "medusa_lm_head.safetensors")}, drafter="mine")
    llm.finish_weight_update()
    assert rounds(llm) == rounds(make("new", **speculative(name="medusa", path=str(heads["new"]))))
    assert llm.weights().version == 1


def test_heads_from_disk(make: Callable[..., LLM], heads: Mapping[str, Path]) -> None:
    llm = make(weight_transport="disk", **speculative(name="medusa", path=str(heads["old"])))
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"path": str(heads["new"] / "medusa_lm_head.safetensors")}, drafter="mine")
    llm.finish_weight_update()
    assert rounds(llm) == rounds(make(**speculative(name="medusa", path=str(heads["new"]))))


def test_heads_that_do_not_fit_are_refused(make: Callable[..., LLM], heads: Mapping[str, Path]) -> None:
    llm = make(**speculative(name="medusa", path=str(heads["old"])))
    before = rounds(llm)
    tensors = load_file(heads["new"] / "medusa_lm_head.safetensors")
    del tensors["2.0.linear.bias"]
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"weights": tensors | {"0.0.linear.bias": torch.zeros(3)}}, drafter="mine")
    with pytest.raises(ModelError, match=r"0.0.linear.bias has shape \[3\], expected \[64\].*2.0.linear.bias.*missing"):
        llm.finish_weight_update()
    assert rounds(llm) == before


def test_a_drafter_without_weights_is_refused(make: Callable[..., LLM]) -> None:
    llm = make(**speculative(name="ngram"))
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    with pytest.raises(RequestError, match=r"'mine' \(NgramDrafter\) has no weights"):
        llm.update_weights({"weights": {"a": torch.zeros(1)}}, drafter="mine")
