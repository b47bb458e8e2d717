"""Heads on disk, in every form that is read, and the tokens that the drafter guesses with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dovetail.contracts.errors import ModelError
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import DraftBatch, DraftRequest, LayerSetup, SpeculationNeed
from dovetail.nn import BuildContext
from dovetail.spec_decode.draft_vocabulary import FILE
from dovetail.spec_decode.medusa.drafter import MedusaDrafter, MedusaOptions
from dovetail.spec_decode.medusa.format import read_layout
from dovetail.testing.draft_pages import SuitePages
from dovetail.testing.draft_suite import DraftWorkerSuite
from dovetail.worker.speculation.draft_sampling import draft_distributions, draft_draw

HIDDEN, VOCAB, HEADS = 8, 50, 4
ACCURACIES = [[0.6, 0.2], [0.4, 0.1], [0.3, 0.1], [0.2]]
NEED = SpeculationNeed("cpu", "float32", VOCAB, HIDDEN, 1, HEADS)
ENVIRONMENT = Environment("cpu", 1, 2**30)


def head_tensors(num_heads: int = HEADS, num_layers: int = 1, vocab_size: int | None = None) -> dict[str, torch.Tensor]:
    """Weights by FasterDecoding's names; with `vocab_size` each head has an unembedding."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for k in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{k}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator)
            tensors[f"{k}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        if vocab_size is not None:
            tensors[f"{k}.{num_layers}.weight"] = torch.randn(vocab_size, HIDDEN, generator=generator)
    return tensors


def write(
    folder: Path, tensors: dict[str, torch.Tensor], file: str = "medusa_lm_head.safetensors", **config: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": HEADS} | config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("heads"), head_tensors(), medusa_head_accuracies=ACCURACIES)


class MedusaSuite(DraftWorkerSuite):
    plugin = MedusaDrafter
    hidden_size = HIDDEN
    vocab_size = VOCAB

    @pytest.fixture(autouse=True)
    def _heads(self, heads: Path) -> None:
        type(self).options = {**self.options, "path": str(heads)}


class TestChain(MedusaSuite):
    options = {}  # noqa: RUF012


class TestTree(MedusaSuite):
    options = {"tree": "auto"}  # noqa: RUF012


def expected_candidates(tensors: dict[str, torch.Tensor], setup: LayerSetup, hidden: torch.Tensor) -> list[list[int]]:
    """Per head its tokens, best first, computed the plain way."""
    found = []
    num_layers = len([name for name in tensors if name.startswith("0.") and name.endswith("bias")])
    for k in range(HEADS):
        x = hidden
        for layer in range(num_layers):
            y = tensors[f"{k}.{layer}.linear.weight"] @ x + tensors[f"{k}.{layer}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        own = tensors.get(f"{k}.{num_layers}.weight")
        logits = own @ x if own is not None else setup.compute_logits(x[None])[0]
        found.append(logits.argsort(descending=True).tolist())
    return found


def create(folder: Path, num_tokens: int = HEADS, **options: Any) -> MedusaDrafter:
    torch.manual_seed(0)
    setup = LayerSetup(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_model_len=64,
        max_num_seqs=4,
        num_tokens=num_tokens,
        device=torch.device("cpu"),
        dtype=torch.float32,
        embed=torch.nn.Embedding(VOCAB, HIDDEN),
        compute_logits=torch.nn.Linear(HIDDEN, VOCAB, bias=False),
        num_layers=2,
        distributions=draft_distributions,
        draw=draft_draw,
        pages=SuitePages(),
        create_context=lambda: BuildContext(torch.float32, torch.device("cpu"), 64, "float32"),
    )
    return MedusaDrafter(MedusaOptions.model_validate({"path": folder, **options}), setup)


def propose(worker: MedusaDrafter, hidden: torch.Tensor, count: int = HEADS) -> Any:
    known = np.arange(5, dtype=np.int32)
    # The state that predicted the last known token is the last of the request's rows.
    rows = np.arange(len(hidden))
    request = DraftRequest(0, known, 3, count, SamplingParams(), rows, np.zeros(count))
    return worker.propose(DraftBatch([request], hidden))[0]


@pytest.mark.parametrize(
    ("num_layers", "vocab_size", "file", "prefix"),
    [
        (1, None, "medusa_lm_head.safetensors", ""),
        (2, None, "medusa_lm_head.pt", ""),
        (1, VOCAB, "medusa_lm_head.pt", ""),
        (0, VOCAB, "medusa_lm_head.safetensors", ""),
        (1, VOCAB, "model.safetensors", "medusa_head."),
    ],
    ids=["shared", "two blocks, pt", "own unembedding, pt", "no block", "in a whole checkpoint"],
)
def test_every_form_of_heads_guesses_what_the_plain_computation_gives(
    tmp_path: Path, num_layers: int, vocab_size: int | None, file: str, prefix: str
) -> None:
    tensors = head_tensors(num_layers=num_layers, vocab_size=vocab_size)
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    if prefix:
        stored["model.norm.weight"] = torch.ones(HIDDEN)
    worker = create(write(tmp_path, stored, file))
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    candidates = expected_candidates(tensors, worker.setup, hidden[-1])
    assert propose(worker, hidden).token_ids == [ranked[0] for ranked in candidates]


def test_a_tree_takes_each_node_from_its_head_and_rank(heads: Path) -> None:
    paths = [[0], [0, 1], [2], [0, 0], [0, 1, 0]]
    worker = create(heads, num_tokens=5, tree=paths)
    hidden = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    ranked = expected_candidates(head_tensors(), worker.setup, hidden[0])
    draft = propose(worker, hidden, 5)
    found = []
    for node, parent in enumerate(draft.parents):
        found.append([*(found[parent] if parent >= 0 else []), draft.token_ids[node]])
    expected = [[ranked[depth][rank] for depth, rank in enumerate(path)] for path in paths]
    assert sorted(found) == sorted(expected)


def test_a_tree_cut_short_keeps_whole_paths(heads: Path) -> None:
    worker = create(heads, num_tokens=6, tree="auto")
    draft = propose(worker, torch.randn(1, HIDDEN), 3)
    assert len(draft.token_ids) == 3
    assert all(parent < node for node, parent in enumerate(draft.parents))


def test_config_that_promises_fewer_heads_than_there_are_is_the_trainers_oversight(tmp_path: Path) -> None:
    assert read_layout(write(tmp_path, head_tensors(), medusa_num_heads=2)).num_heads == HEADS


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (drop("1.0.linear.weight"), {}, r"lacks 1\.0\.linear\.weight"),
        (lambda t: t.update({"1.0.linear.bias": torch.zeros(3)}), {}, r"has shape \[3\], expected \[8\]"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(3)}), {}, "no file of Medusa heads"),
        (lambda t: None, {"medusa_num_heads": 5}, "promises 5 heads, .* holds 4"),
        (lambda t: None, {"medusa_num_layers": 3}, "promises 3 blocks per head"),
    ],
)
def test_broken_folders_say_what_is_wrong(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], config: dict[str, int], words: str
) -> None:
    tensors = head_tensors()
    change(tensors)
    write(tmp_path, tensors, **config)
    with pytest.raises(ModelError, match=words):
        read_layout(tmp_path)


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no folder"):
        read_layout(tmp_path / "none")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_layout(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no weights of Medusa heads"):
        read_layout(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"\x08\x00\x00")
    with pytest.raises(ModelError, match="cannot be read"):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"hidden_size": 16}, {}, "trained for a hidden size of 8, the target has 16"),
        ({"num_tokens": 5}, {}, "num_tokens is 5, and there are 4 heads"),
        ({"num_tokens": 2}, {"tree": [[0], [1], [2]]}, "the tree has 3 nodes, and num_tokens allows 2"),
        ({"num_tokens": 9}, {"tree": [[0], [0, 0], [0] * 3, [0] * 4, [0] * 5]}, "5 tokens deep, and there are 4 heads"),
        ({}, {"tree": [[0, 0]]}, "no parent"),
        ({}, {"quantization": "q8"}, "for the unembedding of a draft vocabulary"),
    ],
)
def test_what_does_not_go_together_is_refused_before_weights_are_read(
    heads: Path, change: dict[str, int], options: dict[str, Any], words: str
) -> None:
    asked = MedusaOptions.model_validate({"path": heads, **options})
    assert reasons_against(MedusaDrafter, NEED, MedusaOptions(path=heads), ENVIRONMENT) == []
    reasons = reasons_against(MedusaDrafter, replace(NEED, **change), asked, ENVIRONMENT)
    assert any(words in reason for reason in reasons), reasons


def test_heads_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, head_tensors(vocab_size=VOCAB))
    reasons = reasons_against(MedusaDrafter, replace(NEED, vocab_size=60), MedusaOptions(path=folder), ENVIRONMENT)
    assert reasons == ["its heads know 50 tokens, the target 60"]


def test_an_automatic_tree_needs_measured_accuracies(tmp_path: Path) -> None:
    folder = write(tmp_path, head_tensors())
    reasons = reasons_against(MedusaDrafter, NEED, MedusaOptions(path=folder, tree="auto"), ENVIRONMENT)
    assert len(reasons) == 1
    assert "medusa_head_accuracies" in reasons[0]


def test_without_a_path_only_known_targets_are_served() -> None:
    reasons = reasons_against(MedusaDrafter, NEED, MedusaOptions(), ENVIRONMENT)
    assert len(reasons) == 1
    assert "no heads come with Dovetail for a target with hidden size 8" in reasons[0]


def test_a_draft_vocabulary_leaves_only_its_own_tokens(tmp_path: Path) -> None:
    tensors = head_tensors()
    folder = write(tmp_path, tensors)
    allowed = [3, 7, 20, 41]
    save_file({"token_ids": torch.tensor(allowed, dtype=torch.int32)}, folder / FILE)
    worker = create(folder)
    hidden = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5))
    expected = [
        next(token for token in ranked if token in allowed)
        for ranked in expected_candidates(tensors, worker.setup, hidden[0])
    ]
    assert list(propose(worker, hidden).token_ids) == expected


@pytest.mark.parametrize(
    "tensors",
    [
        {"ids": torch.tensor([1])},
        {"token_ids": torch.tensor([1, VOCAB])},
        {"token_ids": torch.tensor([-1])},
        {"token_ids": torch.tensor([1.0])},
        {"token_ids": torch.empty(0, dtype=torch.int32)},
    ],
    ids=["another name", "too high", "negative", "no integers", "empty"],
)
def test_a_bad_draft_vocabulary_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder = write(tmp_path, head_tensors())
    save_file(tensors, folder / FILE)
    with pytest.raises(ModelError, match="token_ids"):
        create(folder)
