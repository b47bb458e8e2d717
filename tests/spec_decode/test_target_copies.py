"""Medusa and EAGLE over ranks that share the target's embedding and output layer: with copies they draft as in one
process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.commands import explain, load_config
from dovetail.contracts.errors import ConfigError
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from tests.spec_decode.test_eagle import HIDDEN, VOCAB, head_config, random_head, save_head

PROMPTS = [[5, 9, 33, 70, 12], [100, 4], list(range(3, 40)), [7, 8, 9, 7, 8, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAYERS = 3

LOGGED = """
import json
from pathlib import Path

from dovetail.spec_decode.eagle.drafter import EagleDrafter, EagleOptions
from dovetail.spec_decode.medusa.drafter import MedusaDrafter, MedusaOptions


class LoggedEagleOptions(EagleOptions):
    log: Path


class LoggedMedusaOptions(MedusaOptions):
    log: Path


def noted(self, batch, drafts):
    with self.options.log.open("a") as file:
        for request, draft in zip(batch.requests, drafts):
            if draft is not None:
                print(json.dumps([request.token_ids.tolist(), list(draft.token_ids)]), file=file)
    return drafts


class Eagle(EagleDrafter):
    Options = LoggedEagleOptions

    def propose(self, batch):
        return noted(self, batch, super().propose(batch))


class Medusa(MedusaDrafter):
    Options = LoggedMedusaOptions

    def propose(self, batch):
        return noted(self, batch, super().propose(batch))
"""

Told = list[tuple[list[int], int]]


class Models:
    """A target with its output layer tied or not, another one of its shape, and heads without ends of their own."""

    def __init__(self, directory: Path):
        self.directory = directory
        for seed, name in enumerate(("old", "new"), 1):
            save_tiny_model(directory / name, tiny_config("llama", num_hidden_layers=LAYERS), seed=seed)
        tied = tiny_config("llama", num_hidden_layers=LAYERS, tie_word_embeddings=True)
        save_tiny_model(directory / "tied", tied)
        (directory / "logged.py").write_text(LOGGED)
        self.eagle = save_head(directory / "eagle", head_config(1), random_head(1))
        reads = head_config(3, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
        self.eagle3 = save_head(directory / "eagle3", reads, random_head(3))
        self.medusa = directory / "medusa"
        self.medusa.mkdir()
        (self.medusa / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
        generator = torch.Generator().manual_seed(0)
        tensors = {f"{k}.0.linear.weight": torch.randn(HIDDEN, HIDDEN, generator=generator) / 4 for k in range(3)}
        save_file(
            tensors | {f"{k}.0.linear.bias": torch.zeros(HIDDEN) for k in range(3)},
            self.medusa / "medusa_lm_head.safetensors",
        )

    def sections(self, target: str, executor: dict[str, Any], **more: Any) -> dict[str, Any]:
        plugins, length = self.directory / "logged.py", {"num_tokens": 3, "length": "fixed"}
        log = {"log": str(self.directory / "log")}
        drafters = {
            "eagle": {"name": f"{plugins}:Eagle", "path": str(self.eagle), "quantization": None} | length | log,
            "eagle3": {"name": f"{plugins}:Eagle", "path": str(self.eagle3), "quantization": None} | length | log,
            "medusa": {"name": f"{plugins}:Medusa", "path": str(self.medusa)} | length | log,
        }
        return {
            "model": {"path": str(self.directory / target), "tokenizer_mode": "none", "dtype": "float32"},
            "cache": {"block_size": 4, "num_blocks": 200, "prefix_caching": False},
            "executor": {"threads": 1} | executor,
            "speculative": {"drafters": drafters, "default": "eagle"},
        } | more

    def told(self, llm: LLM) -> tuple[Told, set[str]]:
        """Tokens and numbers of accepted drafts of each request, and all drafts with the tokens before them."""
        log = self.directory / "log"
        log.write_text("")
        told = []
        for drafter in ("eagle", "eagle3", "medusa"):
            outputs = llm.generate(PROMPTS, replace(GREEDY, speculation=drafter), use_tqdm=False)
            assert not any(output.metrics.drafter_error for output in outputs)
            told += [(output.outputs[0].token_ids, output.metrics.num_accepted) for output in outputs]
        return told, set(log.read_text().splitlines())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def alone(models: Models) -> dict[str, Any]:
    """What one process does, by target."""
    expected = {}
    for target in ("old", "new", "tied"):
        with LLM(**models.sections(target, {})) as llm:
            expected[target] = models.told(llm)
    assert len(expected["old"][1]) > 50
    return expected


def test_two_ranks_draft_as_one_process_also_after_sleep_and_an_update(models: Models, alone: dict[str, Any]) -> None:
    with LLM(**models.sections("old", {"tensor_parallel": 2}, weight_transport="disk")) as llm:
        assert models.told(llm) == alone["old"]
        llm.sleep(level=2)
        llm.wake_up()
        assert models.told(llm) == alone["old"]
        llm.init_weight_transfer_engine()
        llm.start_weight_update()
        llm.update_weights({"path": str(models.directory / "new")})
        llm.finish_weight_update()
        assert models.told(llm) == alone["new"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_last_of_two_stages_drafts_as_one_process(models: Models, alone: dict[str, Any], ranks: int) -> None:
    """With a tied table, which the stage has whole where it is of one rank; and with states between the layers of both
    stages."""
    with LLM(**models.sections("tied", {"pipeline_parallel": 2, "tensor_parallel": ranks})) as llm:
        assert models.told(llm) == alone["tied"]


@pytest.mark.parametrize(
    ("target", "executor", "tables"),
    [
        ("old", {}, 0),
        ("old", {"tensor_parallel": 2}, 2),
        ("old", {"pipeline_parallel": 2}, 1),
        ("tied", {"pipeline_parallel": 2}, 0),
    ],
)
def test_copies_are_counted_once(models: Models, target: str, executor: dict[str, int], tables: int) -> None:
    """As often as the rank that drafts holds a table of its own; a tied one that it has whole is no copy."""
    sections = models.sections(target, executor)
    sections["model"]["quantization"] = None
    estimate = explain(load_config(sections)).estimate
    assert estimate is not None
    assert round(estimate.target_copy_bytes / (VOCAB * HIDDEN * 4)) == tables


def test_what_stays_refused_says_what_to_do(models: Models) -> None:
    sections = models.sections("old", {"pipeline_parallel": 2})
    sections["speculative"]["drafters"]["eagle"] |= {"top_k": 3}
    with pytest.raises(ConfigError, match=r"it proposes trees.*set executor.pipeline_parallel to 1"):
        LLM(**sections)
