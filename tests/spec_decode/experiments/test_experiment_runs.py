"""Whole experiments on a tiny model through the command line: what comes out, never how fast."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.spec_decode.experiments.arms import prepare
from dovetail.spec_decode.experiments.cli import app
from dovetail.spec_decode.experiments.command import ABCommand
from dovetail.spec_decode.experiments.datasets import load_prompts
from dovetail.spec_decode.experiments.engine_features import NOT_SERVED
from dovetail.spec_decode.experiments.foretell import Duration, Foretold, foretell
from dovetail.spec_decode.experiments.journal import default_journal
from dovetail.spec_decode.experiments.schema import parse_experiment
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

WRONG_RULE = """
from dovetail.contracts.speculation import AcceptanceCapabilities, AcceptanceRule, Verdict


class TakesAll(AcceptanceRule):
    contract = (1, 0)
    capabilities = AcceptanceCapabilities(lossless=True, sampling=True)

    def verify(self, requests):
        return [
            Verdict(list(range(len(r.draft.token_ids))), int(r.target.probs()[-1].argmax())) for r in requests
        ]


class OwnsUp(TakesAll):
    capabilities = AcceptanceCapabilities(sampling=True)


class AlwaysBest(TakesAll):
    def verify(self, requests):
        return [Verdict([], int(r.target.probs()[0].argmax())) for r in requests]


# Accepts drafts, which were not drawn, twice too readily. Rules that are nearly right are in test_lossless_drawn.py and
# test_martingale.py.
class Readily(TakesAll):
    def verify(self, requests):
        return [self._judge(request) for request in requests]

    def _judge(self, request):
        tokens, probs = request.draft.token_ids, request.target.probs()
        for node, token in enumerate(tokens):
            if request.accept_uniforms[node] >= 2 * float(probs[node, token]):
                rest = probs[node].clone()
                rest[token] = 0
                return Verdict(list(range(node)), self._draw(rest / rest.sum(), request.recover_uniforms[node]))
        return Verdict(list(range(len(tokens))), self._draw(probs[-1], request.recover_uniforms[-1]))

    def _draw(self, probs, uniform):
        return min(int((probs.double().cumsum(0) <= uniform).sum()), len(probs) - 1)
"""
STUBBORN_DRAFTER = """
from dovetail.spec_decode.suffix.drafter import SuffixDrafter


class Stubborn(SuffixDrafter):
    def forget_finished(self):
        pass
"""
ENGINE_FEATURES = ("prefix cache", "chunked prefill", "preemption", "tensor parallel", *NOT_SERVED)
RAISING_DRAFTER = """
from dovetail.contracts.speculation import DraftWorker


class Raises(DraftWorker):
    contract = (1, 0)

    def propose(self, batch):
        raise RuntimeError("no heads")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiments")
    save_tiny_model(folder / "model", tiny_config("llama", vocab_size=64))
    (folder / "rule.py").write_text(WRONG_RULE)
    (folder / "raising.py").write_text(RAISING_DRAFTER)
    # Short cycles, which prompt lookup finds.
    prompts = [[(a * b) % 60 + 1 for b in range(1, 6)] * 3 for a in range(1, 9)]
    lines = [{"prompt_token_ids": ids, "category": "even" if i % 2 else "odd"} for i, ids in enumerate(prompts)]
    (folder / "set.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def experiment(**changes: Any) -> dict[str, Any]:
    config = {
        "model": {"path": "./model", "tokenizer_mode": "none", "dtype": "float32"},
        "cache": {"num_blocks": 200},
        "executor": {"threads": 1},
        "attention": "sdpa",
        "speculative": {"drafters": {"lookup": {"name": "ngram", "num_tokens": 3, "length": "fixed", "min_match": 1}}},
    }
    return {
        "name": "tiny",
        "config": config,
        "arms": {"lookup": {"drafter": "lookup"}},
        "workload": {"data": "set.jsonl"},
        "sampling": {"max_tokens": 12, "ignore_eos": True},
        "repetitions": 1,
        "rerun_disturbed": 0,
        "warmup": 1,
        "compatibility": False,
    } | changes


def invoke(folder: Path, data: dict[str, Any], *arguments: str) -> Any:
    path = folder / "e.yaml"
    path.write_text(yaml.safe_dump(data))
    default_journal(path).unlink(missing_ok=True)
    return CliRunner().invoke(app, [str(path), *arguments])


def run(folder: Path, data: dict[str, Any], name: str = "report", *arguments: str) -> dict[str, Any]:
    out = folder / f"{name}.json"
    found = invoke(folder, data, "--json", str(out), "--html", str(folder / f"{name}.html"), *arguments)
    assert found.exit_code == 0, found.output + repr(found.exception)
    # What comes after the turns takes long as well.
    later = found.stderr.partition("turns in ")[2]
    assert "after the turns: comparing tokens, and drawing the intervals" in later
    assert ("after the turns: trying each arm" in later) == data["compatibility"]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


class Page(HTMLParser):
    """Checks that tags close in order, and notes what a page refers to."""

    VOID = frozenset({"meta", "br", "path", "circle", "rect"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.outside: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.outside += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def grid_run(folder: Path) -> dict[str, Any]:
    data = experiment(
        arms={
            "lookup": {"drafter": "lookup"},
            "short": {"drafter": {"name": "ngram", "max_match": 2}, "num_tokens": 2},
        },
        grid={"batch_sizes": [1, 2], "draft_lengths": [1, 3]},
        repetitions=2,
        compatibility=True,
    )
    return run(folder, data, "grid")


def test_every_turn_is_there_and_warm_up_is_not(grid_run: dict[str, Any]) -> None:
    requests = grid_run["requests"]
    cells = list(zip(requests["arm"], requests["length"], requests["batch"], strict=True))
    variants = {("plain", None), ("plain-again", None), ("lookup", 1), ("lookup", 3), ("short", 2)}
    assert {(arm, length) for arm, length, _ in cells} == variants
    # 8 prompts, 2 repetitions.
    assert {cell: cells.count(cell) for cell in cells} == {(*v, batch): 16 for v in variants for batch in (1, 2)}
    assert all(len(ids) == 12 for ids in requests["token_ids"])
    assert all(len(times) == 12 for times in requests["times"])
    steps = grid_run["step_samples"]
    assert sum(steps["tokens"]) >= sum(map(len, requests["token_ids"]))
    assert sum(steps["accepted"]) == sum(requests["accepted"]) > 0
    assert sum(steps["drafted"]) == sum(requests["drafted"])
    assert all(
        drafted == 0 for drafted, length in zip(requests["drafted"], requests["length"], strict=True) if not length
    )


def test_greedy_drafts_are_lossless_and_the_report_says_so(grid_run: dict[str, Any]) -> None:
    assert {row["equality"] for row in grid_run["results"]} <= {"identical", "lossless"}
    assert all(row["lossless"] for row in grid_run["results"])
    assert len(grid_run["results"]) == 6
    assert {e["arm"] for e in grid_run["equality"]} == {"plain", "plain-again", "lookup", "short"}


def test_speed_has_intervals_where_groups_suffice(grid_run: dict[str, Any]) -> None:
    for speed in grid_run["speed"]:
        if speed["category"] is None:
            assert (speed["ratio"]["low"] is not None) == (speed["batch"] == 1)  # 8 groups, and 4
    assert any("batch 2: 8 prompts make 4 groups" in warning for warning in grid_run["warnings"])
    assert {cell["length"] for cell in grid_run["grid"]} == {1, 2, 3}
    assert all(cell["predicted"] > 0 for cell in grid_run["grid"])


def test_acceptance_is_by_category_and_length(grid_run: dict[str, Any]) -> None:
    found = {(a["arm"], a["length"], a["batch"], a["category"]): a for a in grid_run["acceptance"]}
    overall, even, odd = (found["lookup", 3, 1, category] for category in (None, "even", "odd"))
    assert overall["accepted"] == even["accepted"] + odd["accepted"]
    assert overall["positions"] == sorted(overall["positions"], reverse=True)
    assert len(overall["positions"]) == 3
    # Some steps of a lookup draft nothing.
    assert 0 < overall["rounds"] <= overall["decode_steps"]
    assert overall["round_length"]["value"] >= overall["accepted_length"]["value"]
    requests = grid_run["requests"]
    drafted, verified = requests["drafted"], requests["drafted_per_position"]
    assert [sum(own) for own in verified] == drafted
    assert found["lookup", 1, 1, None]["accepted_length"]["value"] <= 2


def test_provenance_says_what_ran(grid_run: dict[str, Any]) -> None:
    found = grid_run["provenance"]
    assert len(found["engines"]) == 1
    assert found["engines"][0]["variants"] == ["plain-again", "lookup@1", "lookup@3", "short@2", "plain"]
    assert found["differences"]["speculative.drafter.max_match"] == {"plain": None, "lookup": 5, "short": 2}
    assert found["workload"]["categories"] == {"even": 4, "odd": 4} or found["workload"]["prompts"] == 8
    assert all(len(found[key]) == 64 for key in ("experiment_sha256",))
    assert "resolution" in found["machine"]["clocks"]["timer"]
    assert found["engines"][0]["kv_blocks"] == 199 or found["engines"][0]["kv_blocks"] == 200


def test_features_ran_with_drafts_and_the_baselines_tokens(grid_run: dict[str, Any]) -> None:
    trials = {(trial["arm"], trial["feature"]): trial["outcome"] for trial in grid_run["features"]}
    asked = [feature for arm, feature in trials if arm == "plain" and feature not in ENGINE_FEATURES]
    # Prompt lookup draws nothing, so seeded requests keep their tokens; and each value shows in the baseline.
    for feature in asked:
        assert trials["plain", feature] == "ran, as the baseline"
        assert trials["lookup", feature] in ("ran, as the baseline", "ran, nothing drafted")
    for feature in ("greedy", "logprobs", "prompt_logprobs", "min_tokens", "temperature, seeded", "n = 2, seeded"):
        assert trials["lookup", feature] == "ran, as the baseline"


def test_what_was_not_tried_or_is_not_served_says_why(grid_run: dict[str, Any]) -> None:
    trials = {(trial["arm"], trial["feature"]): trial for trial in grid_run["features"]}
    for arm in ("plain", "lookup", "short"):
        assert trials[arm, "prefix cache"]["outcome"] == "ran, as the baseline"
        assert "takes in the longest prompt whole" in trials[arm, "chunked prefill"]["reason"]
        assert "executor.tensor_parallel is 1" in trials[arm, "tensor parallel"]["reason"]
        assert {trials[arm, name]["outcome"] for name in NOT_SERVED} == {"not served"}


def test_memory_and_budgets_are_tried_where_little_suffices(folder: Path) -> None:
    config = experiment()["config"] | {
        "cache": {"num_blocks": 50},
        "scheduler": {"max_num_batched_tokens": 200, "max_num_seqs": 8},
    }
    data = experiment(config=config, compatibility=True, workload={"data": "set.jsonl", "limit": 2})
    report = run(folder, data, "little")
    trials = {(trial["arm"], trial["feature"]): trial["outcome"] for trial in report["features"]}
    for arm in ("plain", "lookup"):
        assert trials[arm, "chunked prefill"] == trials[arm, "preemption"] == "ran, as the baseline"


def test_features_are_tried_with_drafts_where_the_length_adapts(folder: Path, grid_run: dict[str, Any]) -> None:
    arms = {"adaptive": {"drafter": {"name": "ngram", "length": "adaptive", "min_match": 1}, "num_tokens": 3}}
    report = run(folder, experiment(arms=arms, compatibility=True), "adaptive")
    fixed, adaptive = (
        {trial["feature"]: trial["outcome"] for trial in one["features"] if trial["arm"] == arm}
        for one, arm in ((grid_run, "lookup"), (report, "adaptive"))
    )
    assert adaptive == fixed
    assert adaptive["greedy"] == "ran, as the baseline"


def test_arms_that_do_not_differ_are_told_that_the_experiment_fixes_the_length(folder: Path) -> None:
    arms = {name: {"drafter": {"name": "ngram"}, "num_tokens": 3} for name in "ab"}
    found = invoke(folder, experiment(arms=arms), "--check")
    assert isinstance(found.exception, ConfigError), found.output
    assert "'a' and 'b' do not differ" in str(found.exception)
    assert "write `length: adaptive`" in str(found.exception)


def test_a_larger_draft_model_makes_no_time_negative(folder: Path) -> None:
    drafter = {"name": "draft_model", "path": "./model", "num_tokens": 2}
    twice = {"lookup": {"drafter": drafter}, "again": {"drafter": drafter | {"num_tokens": 3}}}
    found = invoke(folder, experiment(arms=twice), "--check")
    assert found.exit_code == 0, found.output + repr(found.exception)
    assert "minutes of turns" in found.output
    assert "about -" not in found.output


def test_an_arm_that_ignores_a_feature_is_told(folder: Path) -> None:
    config = {"speculative": {"acceptance": "./rule.py:AlwaysBest"}}
    arms = {"best": {"drafter": "lookup", "config": config}}
    report = run(folder, experiment(arms=arms, compatibility=True, workload={"data": "set.jsonl", "limit": 1}), "best")
    trials = {trial["feature"]: trial["outcome"] for trial in report["features"] if trial["arm"] == "best"}
    for feature in ("temperature, seeded", "n = 2, seeded", "min_p", "top_k", "top_p"):
        assert trials[feature] == "ran, other tokens"
    assert trials["greedy"] == "ran, as the baseline"


def test_the_page_is_whole_and_needs_nothing_else(grid_run: dict[str, Any], folder: Path) -> None:
    text = (folder / "grid.html").read_text()
    page = Page(text)
    assert page.outside == []
    assert "script" not in page.seen
    assert page.seen.count("svg") >= 8
    for part in ("Provenance", "Equality", "Acceptance", "Speed", "Batch x length", "Cost per step", "Memory"):
        assert part in page.text
    assert "http" not in text.partition("<details>")[0]
    assert "prefers-color-scheme: dark" in text


def test_fail_if_decides_the_exit_code(folder: Path) -> None:
    good = invoke(folder, experiment(), "--fail-if", "lossless == false or acceptance.rate <= 0")
    assert good.exit_code == 0, good.output
    bad = invoke(folder, experiment(), "--fail-if", "acceptance.length > 1")
    assert bad.exit_code == 1
    assert "failed: lookup@3, batch 1: acceptance.length = " in bad.stderr


def test_a_rule_that_takes_everything_is_caught_and_one_that_owns_up_is_labelled(folder: Path) -> None:
    arms = {
        name: {"drafter": "lookup", "config": {"speculative": {"acceptance": f"./rule.py:{name}"}}}
        for name in ("TakesAll", "OwnsUp")
    }
    report = run(folder, experiment(arms=arms, repetitions=2), "wrong")
    found = {row["arm"]: row for row in report["results"]}
    assert found["TakesAll"]["equality"] == "LOSSY"
    assert found["TakesAll"]["diverged.real"] > 0
    assert found["OwnsUp"]["equality"] == "lossy by declaration"
    assert not found["OwnsUp"]["lossless"]
    assert len(report["provenance"]["engines"]) == 2
    first = next(e for e in report["equality"] if e["arm"] == "TakesAll")["divergences"][0]
    assert first["expected"] != first["got"]
    assert not first["is_tie"]
    # In float32, decoding one by one and scoring in one pass differ by rounding alone.
    assert {e["tie_gap"] for e in report["equality"]} == {1e-3}
    control = next(e for e in report["equality"] if e["arm"] == "plain-again")
    assert control["verdict"] == "identical"


def test_another_model_is_not_lossless_however_wide_ties_are(folder: Path) -> None:
    """Its arm names the one key in which it differs, beneath a mapping that is empty in plain."""
    other = {"drafter": "off", "config": {"model": {"hf_overrides": {"rms_norm_eps": 2e-4}}}}
    data = experiment(arms={"other": other, "lookup": {"drafter": "lookup"}}, tie_gap=0.78)
    data["sampling"] = {"max_tokens": 24, "ignore_eos": True}
    report = run(folder, data, "eps")
    found = {e["arm"]: e for e in report["equality"]}
    assert found["other"]["verdict"] == "LOSSY"
    assert all(one["is_tie"] for one in found["other"]["divergences"])
    assert (found["other"]["control_diverged"], found["other"]["control_batch"]) == (0, 2)
    assert found["lookup"]["verdict"] == "identical"
    assert any("tie_gap is 0.78" in warning for warning in report["warnings"])
    assert "model.hf_overrides" not in report["provenance"]["differences"]
    assert report["provenance"]["differences"]["model.hf_overrides.rms_norm_eps"]["other"] == 2e-4


@pytest.mark.parametrize("wrong", ["Readily", pytest.param("AlwaysBest", marks=pytest.mark.nightly)])
def test_sampled_runs_watch_their_rules(folder: Path, wrong: str) -> None:
    lookup = {"drafter": "lookup"}
    arms = {
        "lookup": lookup,
        "wrong": lookup | {"config": {"speculative": {"acceptance": f"./rule.py:{wrong}"}}},
        "eps": {"drafter": "off", "config": {"model": {"hf_overrides": {"rms_norm_eps": 2e-4}}}},
    }
    sampling = {"max_tokens": 32, "ignore_eos": True, "temperature": 0.25}
    report = run(folder, experiment(arms=arms, sampling=sampling, repetitions=2, grid={"batch_sizes": [8]}), "sampled")
    found = {e["arm"]: e for e in report["equality"]}
    assert found["lookup"]["verdict"] != "LOSSY"
    assert found["lookup"]["drafted_tokens"]["places"] > 0
    assert found["wrong"]["verdict"] == "LOSSY"
    assert wrong != "Readily" or found["wrong"]["drafted_tokens"]["excess"] > 1
    assert found["eps"]["verdict"] == "not shown"
    assert "temperature 0" in found["eps"]["reason"]


def test_a_drafter_that_raises_is_told_and_the_rest_goes_on(folder: Path) -> None:
    arms = {"lookup": {"drafter": "lookup"}, "raising": {"drafter": "./raising.py:Raises"}}
    arms["raising"] = {"drafter": {"name": "./raising.py:Raises"}}
    report = run(folder, experiment(arms=arms), "raising")
    status = {item["arm"]: item for item in report["status"]}
    assert "Raises raised RuntimeError: no heads" in status["raising"]["reason"]
    assert status["lookup"]["reason"] == ""
    assert any("raising<=4, batch 1: nothing was drafted" in warning for warning in report["warnings"])


def test_a_drafter_with_a_memory_begins_each_batch_size_and_repetition_anew(folder: Path) -> None:
    arms = {"suffix": {"drafter": {"name": "suffix", "num_tokens": 3, "length": "fixed"}}}
    report = run(folder, experiment(arms=arms, grid={"batch_sizes": [1, 8]}, repetitions=2), "suffix")
    assert not any("remembers" in warning for warning in report["warnings"])
    cells = [item for item in report["acceptance"] if item["category"] is None]
    assert [item["by_repetition"][0] for item in cells] == [item["by_repetition"][1] for item in cells]


def test_a_drafter_that_forgets_nothing_is_told(folder: Path) -> None:
    (folder / "stubborn.py").write_text(STUBBORN_DRAFTER)
    stubborn = {"name": "./stubborn.py:Stubborn", "num_tokens": 3, "length": "fixed"}
    report = run(folder, experiment(arms={"stubborn": {"drafter": stubborn}}, repetitions=2), "stubborn")
    assert any("stubborn@3, batch 1: this drafter remembers" in warning for warning in report["warnings"])


def test_arms_on_other_backends_get_engines_of_their_own(folder: Path) -> None:
    arms = {"lookup": {"drafter": "lookup"}, "ref": {"drafter": "off", "config": {"attention": "reference"}}}
    report = run(folder, experiment(arms=arms), "engines")
    assert [engine["attention"] for engine in report["provenance"]["engines"]] == ["sdpa", "reference"]
    assert any("2 engines in this process" in note for note in report["provenance"]["notes"])
    assert report["provenance"]["differences"]["attention.name"]["ref"] == "reference"


def test_refused_arms_end_the_experiment_or_are_left_out(folder: Path) -> None:
    arms = {"lookup": {"drafter": "lookup"}, "gone": {"drafter": {"name": "ngrm"}}}
    refused = invoke(folder, experiment(arms=arms))
    assert isinstance(refused.exception, ConfigError)
    assert "arm 'gone' is refused" in str(refused.exception)
    assert "ngram" in str(refused.exception)
    report = run(folder, experiment(arms=arms, keep_going=True), "refused")
    status = {item["arm"]: item for item in report["status"]}
    assert (status["gone"]["ran"], status["lookup"]["ran"]) == (False, True)


def test_requests_that_an_arm_refuses_leave_it_out(folder: Path) -> None:
    greedy = {"drafter": "lookup", "config": {"speculative": {"acceptance": "greedy"}}}
    data = experiment(arms={"lookup": {"drafter": "lookup"}, "greedy": greedy})
    data["sampling"] = {"max_tokens": 6, "temperature": 1.0}
    refused = invoke(folder, data)
    assert isinstance(refused.exception, ConfigError)
    assert "serves temperature 0 only" in str(refused.exception)
    report = run(folder, data | {"keep_going": True}, "left-out")
    status = {item["arm"]: item for item in report["status"]}
    assert not status["greedy"]["ran"]
    assert {row["arm"]: row["ran"] for row in report["results"]} == {"lookup": True, "greedy": False}


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"arms": {"a": {"drafter": "lookup"}, "b": {"drafter": "lookup"}}}, [], "'a' and 'b' do not differ"),
        ({"arms": {"a": {"drafter": "off"}}}, [], "'plain' and 'a' do not differ"),
        ({"arms": {"a": {"drafter": "lokup"}}}, [], "'lokup' is not among config.speculative.drafters (lookup"),
        ({"arms": {"a": {"drafter": "off", "num_tokens": 2}}}, [], "drafts nothing"),
        (
            {
                "arms": {"a": {"drafter": "lookup", "config": {"attention": "reference"}}},
                "declared_difference": ["speculative"],
            },
            [],
            "arms differ in attention.name, attention.gather_kib, which are not declared",
        ),
        ({"grid": {"batch_sizes": [300]}}, [], "max_num_seqs is 256"),
        ({"grid": {"batch_sizes": [9]}}, [], "fewer than batch size 9"),
        ({"workload": {"data": "set.jsonl", "template": "chat"}}, [], "no chat template"),
        ({"sampling": {"max_tokens": 250}}, [], "exceeds max_model_len 256"),
        ({}, ["--fail-if", "speedup.lo < 1"], "no result 'speedup.lo'; did you mean 'speedup.low'"),
        ({}, ["--json", "/nope/x.json"], "no folder /nope"),
    ],
)
def test_bad_input_is_told(folder: Path, changes: dict[str, Any], arguments: list[str], words: str) -> None:
    found = invoke(folder, experiment(**changes), *arguments)
    assert isinstance(found.exception, DovetailError), found.output
    assert words in str(found.exception)


def test_undeclared_differences_can_be_allowed(folder: Path) -> None:
    arms = {"a": {"drafter": "lookup", "config": {"attention": "reference"}}}
    report = run(folder, experiment(arms=arms, declared_difference=["speculative"]), "allowed", "--allow")
    assert report["provenance"]["undeclared"] == ["attention.name", "attention.gather_kib"]


def test_check_says_what_would_run(folder: Path) -> None:
    found = invoke(folder, experiment(), "--check")
    assert found.exit_code == 0
    assert "engine 1: plain-again, lookup@3, plain" in found.output
    # 8 prompts and one warm-up group, in 3 arms.
    assert "27 groups will run, warm-up included, of 3 arms and lengths" in found.output
    assert "an estimate without any measured step: " in found.output
    assert "batch 1, 8 groups: 1." in found.output


def test_check_counts_only_prompts_that_fit(folder: Path) -> None:
    lines = [json.dumps({"prompt_token_ids": [1 + n, 2, 3] * (100 if n < 2 else 2)}) for n in range(8)]
    (folder / "long.jsonl").write_text("\n".join(lines))
    found = invoke(folder, experiment(workload={"data": "long.jsonl", "skip_too_long": True}), "--check")
    assert found.exit_code == 0, found.output
    # Two of eight have 300 tokens, of 256.
    assert "21 groups will run" in found.output
    assert "batch 1, 6 groups:" in found.output


@pytest.mark.parametrize(("batch", "turns", "again"), [(1, 1 + 2 * 8, 2 * 4), (4, 1 + 2 * 2, 2 * 2)])
def test_check_counts_the_rounds_that_may_run_again(folder: Path, batch: int, turns: int, again: int) -> None:
    """Of 8 prompts in 2 repetitions, after a turn of warm-up."""
    sampling = {"max_tokens": 200, "ignore_eos": True}
    data = experiment(grid={"batch_sizes": [batch]}, repetitions=2, rerun_disturbed=4, sampling=sampling)
    parsed = parse_experiment(data, "here")
    setup = prepare(parsed, folder, allow=False)
    duration = foretell(parsed, setup, load_prompts(parsed.workload, folder), None).duration
    assert duration.minutes is not None
    assert duration.again / duration.minutes == pytest.approx(again / turns)


def test_check_says_what_else_takes_time() -> None:
    shown = list(Foretold(Duration(0.5, "so it is", 1.25), (), "", 1, ()).lines())
    assert shown[0].startswith(
        "about 0.5 minutes of turns, 1.8 where other processes disturb as many rounds as may run"
    )
    assert shown[1].startswith("  loading, the checks of tokens, the intervals")
    assert next(iter(Foretold(Duration(0.5, ""), (), "", 1, ()).lines())) == "about 0.5 minutes of turns"


def test_check_takes_times_and_spread_from_an_earlier_report(grid_run: dict[str, Any], folder: Path) -> None:
    found = invoke(folder, experiment(), "--check", "--from", str(folder / "grid.json"))
    assert found.exit_code == 0
    assert f"from the turns of the earlier report of {grid_run['provenance']['date']}" in found.output
    assert "smallest, middle and largest of the earlier report's arms" in found.output
    alone = invoke(folder, experiment(), "--from", str(folder / "grid.json"))
    assert isinstance(alone.exception, ConfigError)
    assert "--from says what --check foretells" in str(alone.exception)


GREEDY_RULE = {"a": {"drafter": "lookup", "config": {"speculative": {"acceptance": "greedy"}}}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": {"batch_sizes": [300]}}, "max_num_seqs is 256"),
        ({"grid": {"batch_sizes": [9]}}, "fewer than batch size 9"),
        ({"sampling": {"max_tokens": 5000}}, "leaves no tokens for a prompt"),
        ({"sampling": {"max_tokens": 250}}, "15 tokens, and with 250 more it exceeds max_model_len 256"),
        ({"sampling": {"temperature": 0.7}, "arms": GREEDY_RULE}, "serves temperature 0 only"),
    ],
)
def test_check_finds_what_the_run_would_refuse(folder: Path, changes: dict[str, Any], words: str) -> None:
    found = invoke(folder, experiment(**changes), "--check")
    assert isinstance(found.exception, ConfigError), found.output
    assert words in str(found.exception)


@pytest.mark.parametrize("arguments", [["--check", "e.yaml"], ["--fail-if", "lossless", "--check", "e.yaml"]])
def test_options_may_stand_before_the_file(folder: Path, arguments: list[str]) -> None:
    (folder / "e.yaml").write_text(yaml.safe_dump(experiment()))
    found = CliRunner().invoke(app, [*arguments[:-1], str(folder / arguments[-1])])
    assert found.exit_code == 0, found.output
    assert "engine 1:" in found.output


def compare(folder: Path, old: str, new: str, *options: str) -> Any:
    return CliRunner().invoke(app, ["compare", str(folder / f"{old}.json"), str(folder / f"{new}.json"), *options])


def test_a_regression_fails_and_the_same_report_does_not(folder: Path) -> None:
    run(folder, experiment(), "old")
    same = compare(folder, "old", "old", "--fail-on-regression")
    assert same.exit_code == 0, same.output
    assert "acceptance rate" in same.output
    assert "undecided" not in same.output
    run(folder, experiment(arms={"other": {"drafter": "lookup"}}), "renamed")
    gone = compare(folder, "old", "renamed", "--fail-on-regression")
    assert gone.exit_code == 1, gone.output
    assert "worse: lookup@3, batch 1 arm" in gone.stderr


def test_reports_of_other_experiments_are_refused(folder: Path) -> None:
    run(folder, experiment(), "old")
    run(folder, experiment(sampling={"max_tokens": 6, "ignore_eos": True}), "other")
    refused = compare(folder, "old", "other")
    assert isinstance(refused.exception, ConfigError)
    assert "experiment.sampling" in str(refused.exception)
    allowed = compare(folder, "old", "other", "--allow")
    assert allowed.exit_code == 0, allowed.output
    (folder / "bad.json").write_text("{}")
    bad = compare(folder, "bad", "old")
    assert "is no report of `dovetail ab`" in str(bad.exception)


def test_init_writes_a_file_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert CliRunner().invoke(app, ["init", str(path)]).exit_code == 0
    again = CliRunner().invoke(app, ["init", str(path)])
    assert "is there already" in str(again.exception)


def test_a_length_that_a_drafter_writes_is_kept(folder: Path) -> None:
    arms = {name: {"drafter": {"name": "ngram", "length": name}} for name in ("adaptive", "fixed")}
    arms["plainly"] = {"drafter": {"name": "ngram", "min_match": 1}}
    found = invoke(folder, experiment(arms=arms, grid={"draft_lengths": [2, 4]}), "--check")
    assert found.exit_code == 0, repr(found.exception)
    for label in ("adaptive<=2", "adaptive<=4", "fixed@2", "fixed@4", "plainly@2"):
        assert label in found.output


def test_it_is_a_command() -> None:
    found = CliRunner().invoke(ABCommand().app(), ["--help"])
    assert all(name in found.output for name in ("run", "compare", "init"))
