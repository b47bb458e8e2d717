"""Second turns: behind the baseline's answers, the same tokens in every arm, and as a chat with the model would go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.datasets import load_prompts
from dovetail.spec_decode.experiments.experiment import run_experiment
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.schema import WorkloadSection, parse_experiment
from dovetail.testing.chat_models import FAMILIES, save_chat_model
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

CONVERSATIONS = [
    {"question_id": 1, "category": "writing", "turns": ["ab ab ab", "cd cd", "ef"]},
    {"question_id": 2, "category": "rag", "turns": ["gh gh gh gh"]},
    {"question_id": 3, "category": "math", "turns": ["ij ij ij", "kl kl"]},
]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    save_chat_model(folder / "model", FAMILIES["hermes"])
    (folder / "set.jsonl").write_text("\n".join(map(json.dumps, CONVERSATIONS)))
    return folder


def config() -> dict[str, Any]:
    return {
        "model": {"path": "./model", "dtype": "float32"},
        "cache": {"num_blocks": 200},
        "executor": {"threads": 1},
        "attention": "sdpa",
    }


def experiment(**workload: Any) -> dict[str, Any]:
    return {
        "config": config(),
        "arms": {"lookup": {"drafter": {"name": "ngram", "num_tokens": 3, "length": "fixed", "min_match": 1}}},
        "workload": {"data": "set.jsonl", "turns": "all", **workload},
        "sampling": {"max_tokens": NUM_TOKENS},
        "grid": {"batch_sizes": [2]},
        "repetitions": 1,
        "warmup": 0,
        "compatibility": False,
    }


def run(data: dict[str, Any], folder: Path) -> Report:
    return run_experiment(parse_experiment(data, "test"), folder, allow=False)


def test_later_turns_are_what_a_chat_would_be(folder: Path) -> None:
    report = run(experiment(), folder)
    found = {arm: {(r.conversation, r.turn): r for r in report.requests if r.arm == arm} for arm in ("plain", "lookup")}
    turns = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert sorted(found["plain"]) == sorted(found["lookup"]) == turns
    assert report.provenance.workload["later_turns"] == 3
    # Later turns are counted on from the first ones.
    assert {r.prompt for r in found["plain"].values()} == set(range(len(turns)))
    with LLM(**config() | {"model": str(folder / "model")}) as llm:
        for index, conversation in enumerate(CONVERSATIONS):
            messages: list[dict[str, str]] = []
            for turn, text in enumerate(conversation["turns"]):
                messages.append({"role": "user", "content": text})
                (output,) = llm.chat([messages], SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
                answer = output.outputs[0]
                assert list(answer.token_ids) == list(found["plain"][index, turn].token_ids)
                messages.append({"role": "assistant", "content": answer.text.strip()})
    assert {item.verdict for item in report.equality if item.arm == "lookup"} <= {"identical", "lossless"}


def test_turns_of_a_conversation_are_one_cluster(folder: Path) -> None:
    report = run(experiment(), folder)
    (found,) = [a for a in report.acceptance if a.category is None]
    # Six prompts of three conversations: too few for an interval.
    assert found.accepted_length is not None
    assert found.accepted_length.low is None


def test_turns_that_do_not_fit_are_left_out_with_those_behind_them(folder: Path) -> None:
    data = experiment(skip_too_long=True)
    first = load_prompts(WorkloadSection(data="set.jsonl"), folder)
    assert first.num_requests == 3
    data["config"]["model"]["max_model_len"] = 64
    report = run(data, folder)
    turns = {(r.conversation, r.turn) for r in report.requests}
    assert (0, 0) in turns
    assert (0, 2) not in turns
    assert report.provenance.workload["left_out"] + len(turns) == 6


def test_it_is_refused_where_no_prompt_has_a_later_turn(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no prompt of builtin has a later turn"):
        load_prompts(WorkloadSection(turns="all"), folder)


def test_without_a_chat_template_it_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="template is raw"):
        parse_experiment(experiment(template="raw"), "test")
    save_tiny_model(tmp_path / "model", tiny_config("llama", vocab_size=300))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text((folder / "model" / name).read_text())
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "set.jsonl").write_text((folder / "set.jsonl").read_text())
    with pytest.raises(ConfigError, match="needs a chat template"):
        run(experiment(), tmp_path)
