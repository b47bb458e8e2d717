"""Drafters that guess from more than the text are arms like others: from predictions, a corpus, or a further module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.cli import app
from dovetail.spec_decode.experiments.datasets import load_prompts
from dovetail.spec_decode.experiments.schema import WorkloadSection
from dovetail.spec_decode.suffix import corpus as corpora
from dovetail.testing.story_model import STORY, save_story_model

from ..test_mtp import save as save_with_module

FIXED = {"num_tokens": 4, "length": "fixed"}
OPENINGS = [STORY[start : start + 40] for start in range(0, 240, 40)]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    save_story_model(directory)
    return directory


def run(folder: Path, model: Path, drafters: Mapping[str, Any], lines: list[dict[str, Any]], **changes: Any) -> Any:
    """The report of an experiment with an arm for each drafter."""
    (folder / "set.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = {
        "model": {"path": str(model), "dtype": "float32", "max_model_len": 256},
        "cache": {"num_blocks": 128},
        "executor": {"threads": 1},
        "speculative": {"drafters": dict(drafters), "default": None},
    }
    experiment: dict[str, Any] = {
        "config": config,
        "arms": {name: {"drafter": name} for name in drafters},
        "workload": {"data": "set.jsonl"},
        "sampling": {"max_tokens": NUM_TOKENS, "ignore_eos": True},
        "repetitions": 1,
        "rerun_disturbed": 0,
        "warmup": 1,
        "compatibility": False,
    }
    config["model"] |= changes.pop("of_model", {})
    (folder / "e.yaml").write_text(yaml.safe_dump(experiment | changes))
    out = folder / "report.json"
    found = CliRunner().invoke(app, [str(folder / "e.yaml"), "--json", str(out), "--html", str(folder / "report.html")])
    assert found.exit_code == 0, found.output + repr(found.exception)
    return json.loads(out.read_text())


def by_arm(report: Any) -> dict[str, dict[str, Any]]:
    """Of each arm: the tokens of its requests by prompt, and how many drafts were verified and accepted."""
    found: dict[str, dict[str, Any]] = {}
    requests = report["requests"]
    columns = (requests[key] for key in ("arm", "prompt", "token_ids", "drafted", "accepted"))
    for arm, prompt, tokens, drafted, accepted in zip(*columns, strict=True):
        own = found.setdefault(arm, {"tokens": {}, "drafted": 0, "accepted": 0})
        own["tokens"][prompt] = tokens
        own["drafted"] += drafted
        own["accepted"] += accepted
    return found


def assert_lossless(report: Any, arms: set[str]) -> dict[str, dict[str, Any]]:
    """All drafted, accepted some, and gave the tokens of `plain`."""
    assert {row["arm"]: row["equality"] for row in report["results"]} == dict.fromkeys(arms, "identical")
    found = by_arm(report)
    for arm in arms:
        assert found[arm]["tokens"] == found["plain"]["tokens"]
        assert found[arm]["accepted"] > 0
    assert found["plain"]["drafted"] == 0
    return found


PREDICTING = {
    "predicted": {"name": "prediction", **FIXED},
    "lookup": {"name": "ngram", **FIXED},
    "both": {"name": "cascade", "stages": ["predicted", "lookup"], **FIXED},
}


@pytest.fixture(scope="module")
def predicted(model: Path) -> list[dict[str, Any]]:
    """Prompts; of all but the last, a prediction that is right but for a word. One is given as token ids."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(model={"path": str(model), "dtype": "float32"}, cache={"num_blocks": 64}) as llm:
        outputs = llm.generate(OPENINGS, params, use_tqdm=False)
        texts = [output.outputs[0].text.replace("cat", "dog", 1) for output in outputs]
        predictions: list[Any] = [llm.get_tokenizer().encode(texts[0]), *texts[1:-1]]
    lines: list[dict[str, Any]] = [{"prompt": text, "output_tokens": NUM_TOKENS} for text in OPENINGS]
    for line, prediction in zip(lines, predictions, strict=False):
        line["prediction"] = prediction
    return lines


def test_predictions_reach_the_arms_whose_drafters_read_them(
    model: Path, predicted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """And no others: an engine refuses a prediction that nobody would read, so the arm would fail."""
    report = run(tmp_path, model, PREDICTING, predicted)
    found = assert_lossless(report, set(PREDICTING))
    for arm in ("predicted", "both"):
        # Five answers are known but for a word, so most tokens come as drafts.
        assert found[arm]["accepted"] > 5 * NUM_TOKENS / 2
    requests = report["requests"]
    unpredicted = [
        drafted
        for arm, prompt, drafted in zip(requests["arm"], requests["prompt"], requests["drafted"], strict=True)
        if arm == "predicted" and prompt == len(predicted) - 1
    ]
    assert unpredicted == [0]
    assert report["provenance"]["workload"]["predictions"] == 5
    assert "6 prompts (5 with a prediction)" in (tmp_path / "report.html").read_text()


@pytest.mark.nightly
def test_trials_of_features_tell_such_drafters_what_plain_answers(
    model: Path, predicted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """So something is drafted, and the trial says something. The data set's own predictions are of other prompts."""
    report = run(tmp_path, model, {"predicted": PREDICTING["predicted"]}, predicted, compatibility=True)
    outcomes = {(trial["arm"], trial["feature"]): trial["outcome"] for trial in report["features"]}
    for feature in ("greedy", "logprobs", "logit_bias", "temperature, seeded", "prefix cache", "preemption"):
        assert outcomes["predicted", feature] == "ran, as the baseline"


@pytest.mark.nightly
def test_predictions_reach_sampled_arms_and_those_under_load(
    model: Path, predicted: list[dict[str, Any]], tmp_path: Path
) -> None:
    load = {"rates": [20], "requests": 8, "segments": 2}
    sampling = {"temperature": 0.8, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    report = run(tmp_path, model, PREDICTING, predicted, sampling=sampling, load=load, repetitions=3)
    found = by_arm(report)
    assert found["predicted"]["accepted"] > 0
    # The rule is watched in an engine of its own, whose requests bring their predictions too.
    equality = {one["arm"]: one for one in report["equality"]}
    assert equality["predicted"]["verdict"] == equality["both"]["verdict"] == "consistent"
    assert equality["predicted"]["drafted_tokens"]["expected"] > 0
    assert sum(one["drafted"] for one in report["load"]["requests"] if one["arm"] == "predicted") > 0


def test_a_data_set_with_other_predictions_is_another(tmp_path: Path) -> None:
    """A journal of one cannot go on with the other. Without predictions the digest is that of the prompts alone."""
    digests = set()
    for prediction in ({}, {"prediction": None}, {"prediction": "a b"}, {"prediction": "a c"}, {"prediction": [1, 2]}):
        (tmp_path / "set.jsonl").write_text(json.dumps({"prompt": "say a"} | prediction))
        digests.add(load_prompts(WorkloadSection(data="set.jsonl"), tmp_path).sha256)
    assert len(digests) == 4


@pytest.mark.parametrize("prediction", ["", [], [1, -1], [True], 7, {"text": "a"}])
def test_what_is_no_prediction_is_told_with_its_line(tmp_path: Path, prediction: object) -> None:
    (tmp_path / "set.jsonl").write_text(
        json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b", "prediction": prediction})
    )
    with pytest.raises(ConfigError, match=r"set.jsonl:2: prediction must be a text or a list of token ids"):
        load_prompts(WorkloadSection(data="set.jsonl"), tmp_path)


@pytest.mark.parametrize(
    ("prediction", "words"),
    [([1, 400_000], "tokens that the model lacks"), ([1] * 300, "300 tokens, and max_model_len is 256: shorten it")],
)
def test_predictions_that_the_model_cannot_have_are_told(
    model: Path, tmp_path: Path, prediction: list[int], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        run(tmp_path, model, PREDICTING, [{"prompt": "Once", "prediction": prediction}])


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_corpus_is_an_arm(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """Beside the same drafter without, which knows nothing of the story before it was told."""
    monkeypatch.setattr(corpora, "cache_directory", lambda: tmp_path / "cache")
    (tmp_path / "corpus.txt").write_text(STORY * 2)
    suffix = {"name": "suffix", "max_cached_tokens": 0, **FIXED}
    drafters = {"with_corpus": suffix | {"corpus": str(tmp_path / "corpus.txt")}, "without": suffix}
    sampling = {"temperature": temperature, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    lines = [{"prompt": text} for text in OPENINGS]
    report = run(tmp_path, model, drafters, lines, sampling=sampling, repetitions=1 if temperature == 0 else 4)
    found = by_arm(report)
    assert found["with_corpus"]["accepted"] > 2 * found["without"]["accepted"]
    # Guesses are not draws, so seeded requests keep their tokens.
    assert found["with_corpus"]["tokens"] == found["plain"]["tokens"]
    verdicts = {one["arm"]: one["verdict"] for one in report["equality"]}
    assert verdicts["with_corpus"] == ("identical" if temperature == 0 else "consistent")


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 1.4])
def test_a_module_for_multi_token_prediction_is_an_arm(tmp_path: Path, temperature: float) -> None:
    """Of a random module, which guesses right now and then, since the model says little but its first eight tokens."""
    save_with_module(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for name in [name for name in weights if name.endswith(("lm_head.weight", "shared_head.head.weight"))]:
        weights[name][8:] *= 0.1
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    drafters = {"mtp": {"name": "mtp", "path": "./model", "quantization": None, "dtype": "float32", **FIXED}}
    lines = [{"prompt_token_ids": [(a * b) % 60 + 1 for b in range(1, 6)] * 3} for a in range(1, 9)]
    changes: dict[str, Any] = {
        "of_model": {"tokenizer_mode": "none"},
        "sampling": {"temperature": temperature, "max_tokens": NUM_TOKENS, "ignore_eos": True},
        "repetitions": 1 if temperature == 0 else 4,
    }
    report = run(tmp_path, tmp_path / "model", drafters, lines, **changes)
    if temperature == 0:
        assert_lossless(report, {"mtp"})
        return
    # So few drafts of a distribution so flat show no small excess, and the report says so; a gross one would be LOSSY.
    (equality,) = (one for one in report["equality"] if one["arm"] == "mtp")
    assert equality["verdict"] in ("consistent", "not shown")
    assert equality["drafted_tokens"]["came"] > 0
