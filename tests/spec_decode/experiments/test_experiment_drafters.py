"""Every bundled drafter is an arm, under every rule: those that guess from more than the text as well, such as
predictions, a corpus, or a further module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import entry_points
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
        "speculative": {"drafters": dict(drafters), "default": None, "rules": {"block": "block"}},
    }
    experiment: dict[str, Any] = {
        "config": config,
        "arms": {name: {"drafter": name} for name in drafters},
        "workload": {"data": "set.jsonl"},
        "sampling": {"max_tokens": NUM_TOKENS, "ignore_eos": True},
        "grid": {"batch_sizes": [len(lines)]},
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


DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"name": "ngram", **FIXED},
    "suffix": {"name": "suffix", **FIXED},
    "recycling": {"name": "recycling", "num_tokens": 12, "length": "fixed"},
    "lookahead": {"name": "lookahead", "num_tokens": 13, "length": "fixed", "window": 4, "candidates": 3},
    "self_speculation": {"name": "self_speculation", **FIXED, "exit_layer": 1},
    "medusa": {"name": "medusa", "num_tokens": 3, "length": "fixed"},
    "eagle": {"name": "eagle", **FIXED},
    "draft_model": {"name": "draft_model", **FIXED},
    "draft_model-shared_tokens": {"name": "draft_model", **FIXED, "vocabulary": "shared_tokens"},
    "cascade": {"name": "cascade", "stages": ["ngram", "draft_model"], **FIXED},
}


def with_weights(paths: Mapping[str, Path], *names: str) -> dict[str, dict[str, Any]]:
    """Some of `DRAFTERS`, with the options `path`."""
    found = {}
    for name in names:
        path = paths.get(name, paths.get(DRAFTERS[name]["name"]))
        found[name] = DRAFTERS[name] | ({} if path is None else {"path": str(path)})
    return found


def test_every_bundled_drafter_is_here() -> None:
    bundled = {
        entry.name for entry in entry_points(group="dovetail.draft_worker.v1") if entry.value.startswith("dovetail.")
    }
    # Further down are those of prediction and mtp. Requests of an experiment have no grammar to guess from.
    assert bundled - {"prediction", "mtp", "grammar"} == {section["name"] for section in DRAFTERS.values()}


@pytest.mark.parametrize(
    "drafters", [["recycling", "self_speculation"], pytest.param([*DRAFTERS], marks=pytest.mark.nightly)]
)
def test_arms_of_every_drafter_are_lossless(
    drafter_paths: dict[str, Path], tmp_path: Path, drafters: list[str]
) -> None:
    """By day one with trees, and one whose states lie in the target's pages."""
    lines = [{"prompt": text} for text in OPENINGS]
    report = run(tmp_path, drafter_paths["target"], with_weights(drafter_paths, *drafters), lines)
    assert_lossless(report, set(drafters))


@pytest.mark.parametrize(
    "drafter",
    [
        "draft_model",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("draft_model-shared_tokens", "self_speculation", "eagle", "cascade")
        ),
    ],
)
def test_sampled_arms_under_each_rule_are_watched(drafter_paths: dict[str, Path], tmp_path: Path, drafter: str) -> None:
    """One engine, whose requests name the rule."""
    needed = ["ngram", "draft_model"] if drafter == "cascade" else []
    report = run(
        tmp_path,
        drafter_paths["target"],
        with_weights(drafter_paths, drafter, *needed),
        [{"prompt": text} for text in OPENINGS],
        arms={"rejection": {"drafter": drafter}, "block": {"drafter": drafter, "acceptance": "block"}},
        sampling={"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
    )
    assert len(report["provenance"]["engines"]) == 1
    for equality in report["equality"]:
        if equality["arm"] in ("rejection", "block"):
            # So few drafts show gross errors only, and the report says so.
            assert equality["verdict"] in ("consistent", "not shown")
            assert equality["drafted_tokens"]["places"] > 0


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
    """Compared with the same drafter without one, which knows nothing of a story before it has come."""
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
    arms: dict[str, Any] = {"mtp": {"drafter": "mtp"}}
    if temperature:
        arms["block"] = {"drafter": "mtp", "acceptance": "block"}
    changes: dict[str, Any] = {
        "arms": arms,
        "of_model": {"tokenizer_mode": "none"},
        "sampling": {"temperature": temperature, "max_tokens": NUM_TOKENS, "ignore_eos": True},
        "repetitions": 1 if temperature == 0 else 2,
    }
    report = run(tmp_path, tmp_path / "model", drafters, lines, **changes)
    if temperature == 0:
        assert_lossless(report, {"mtp"})
        return
    # So few drafts of a distribution so flat show no small excess, and the report says so; a gross one would be LOSSY.
    for equality in (one for one in report["equality"] if one["arm"] in ("mtp", "block")):
        assert equality["verdict"] in ("consistent", "not shown")
        assert equality["drafted_tokens"]["came"] > 0
