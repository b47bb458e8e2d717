"""Cascades: the first stage with a guess answers, the others see every state, and outputs stay the target's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError
from dovetail.engine.explanation import explain
from dovetail.spec_decode.cascade import CascadeDrafter
from dovetail.spec_decode.experiments.arm_drafters import Written, with_drafters
from dovetail.testing import DraftWorkerSuite

from .watched import PROMPTS, RULES, SURE, Watched, rules, seeded

PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

PLUGINS = '''
"""An outsider's stages: one that guesses now and then, and one that writes down what it sees and what came of it."""

import json
from pathlib import Path

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftCapabilities, DraftWorker


class NowAndThen(DraftWorker):
    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True)

    def propose(self, batch):
        return [
            Draft([request.token_ids[-2]] * min(2, request.max_drafts)) if len(request.token_ids) % 3 == 0 else None
            for request in batch.requests
        ]


class DiaryOptions(PluginOptions):
    path: Path


class Diary(DraftWorker):
    contract = (1, 0)
    Options = DiaryOptions
    capabilities = DraftCapabilities(tensor_parallel=None)

    def write(self, **entry):
        with self.options.path.open("a") as file:
            print(json.dumps(entry), file=file)

    def propose(self, batch):
        for request in batch.requests:
            seen = [request.first_position, request.first_position + len(request.hidden_rows)]
            self.write(what="seen", seq_id=request.seq_id, seen=seen, wanted=request.max_drafts)
        return [Draft(request.token_ids[: request.max_drafts]) for request in batch.requests]

    def on_verified(self, seq_id, accepted, num_drafted):
        self.write(what="verdict", seq_id=seq_id, num_drafted=num_drafted)

    def on_finished(self, seq_id, token_ids):
        self.write(what="finished", seq_id=seq_id)
'''


def drafters(paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    fixed = {"num_tokens": 4, "length": "fixed"}
    return {
        "lookup": {"name": "ngram", **fixed, "min_match": 1},
        "suffix": {"name": "suffix", **fixed, "max_cached_tokens": 0},
        "eagle": {"name": "eagle", **fixed, "path": str(paths["eagle"])},
        "draft": {"name": "draft_model", **fixed, "path": str(paths["draft_model"])},
        "medusa": {"name": "medusa", "num_tokens": 3, "length": "fixed", "path": str(paths["medusa"])},
        "lookup-eagle": {"name": "cascade", **fixed, "stages": ["lookup", "eagle"], "min_tokens": 2},
        "lookup-draft": {"name": "cascade", **fixed, "stages": ["lookup", "draft"]},
        "all": {"name": "cascade", **fixed, "stages": ["suffix", "medusa", "eagle"], "length": "confidence"},
        "adaptive": {"name": "cascade", "num_tokens": 4, "stages": ["lookup", "draft"]},
    }


CASCADES = ["lookup-eagle", "lookup-draft", "all", "adaptive"]


@pytest.fixture(scope="module")
def engine(drafter_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    seen = tmp_path_factory.mktemp("cascade") / "seen.f64"
    with LLM(
        model={"path": str(drafter_paths["target"]), "dtype": "float32"},
        cache={"memory_gib": 0.3},
        executor={"threads": 1},
        scheduler={"max_num_seqs": 64},
        speculative={"drafters": drafters(drafter_paths), "default": None, **rules(seen)},
    ) as llm:
        yield Watched(llm, seen)


@pytest.mark.parametrize("name", CASCADES)
def test_greedy_text_is_that_of_no_drafter(engine: Watched, name: str) -> None:
    llm = engine.llm
    plain = llm.generate(PROMPTS, replace(PARAMS, speculation="off"), use_tqdm=False)
    drafted = llm.generate(PROMPTS, replace(PARAMS, speculation=name), use_tqdm=False)
    assert [one.outputs[0].token_ids for one in drafted] == [one.outputs[0].token_ids for one in plain]
    assert all(one.metrics.drafter_error is None for one in drafted)
    assert name == "adaptive" or all(one.metrics.num_drafted for one in drafted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name",
    ["lookup-draft", *(pytest.param(name, marks=pytest.mark.nightly) for name in CASCADES if name != "lookup-draft")],
)
def test_drawn_drafts_keep_the_distribution(engine: Watched, name: str, rule: str) -> None:
    """Some rounds verify guesses, others draws."""
    evidence = engine.run(name, seeded(), acceptance=RULES[rule]).evidence
    # How much is drafted depends on the times that steps take where the length adapts.
    assert name == "adaptive" or evidence.places > 100
    assert evidence.p > SURE


@pytest.fixture(scope="module")
def outsiders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outsiders") / "stages.py"
    path.write_text(PLUGINS)
    return path


def speculative(stages: dict[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    fixed = {"num_tokens": 4, "length": "fixed"}
    sections = {label: fixed | section for label, section in stages.items()}
    return {"drafters": {**sections, "both": {"name": "cascade", **fixed, "stages": list(stages), **options}}}


def test_an_outsiders_stage_sees_every_position_once_and_what_became_of_its_drafts(
    drafter_paths: dict[str, Path], outsiders: Path, tmp_path: Path
) -> None:
    diary = tmp_path / "diary.jsonl"
    stages = {
        "sometimes": {"name": f"{outsiders}:NowAndThen"},
        "diary": {"name": f"{outsiders}:Diary", "path": str(diary)},
    }
    model = {"path": str(drafter_paths["target"]), "dtype": "float32"}
    with LLM(model=model, cache={"memory_gib": 0.1}, speculative=speculative(stages)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert {output.metrics.drafter for output in outputs} == {"both"}, "the only drafter that is no stage"
    entries = [json.loads(line) for line in diary.read_text().splitlines()]
    for seq_id in {entry["seq_id"] for entry in entries}:
        own = [entry for entry in entries if entry["seq_id"] == seq_id]
        spans = [entry["seen"] for entry in own if entry["what"] == "seen"]
        assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
        wanted = [entry["wanted"] for entry in own if entry["what"] == "seen"]
        assert 0 in wanted, "the first stage answered"
        assert max(wanted) == 4
        # A verdict follows each draft of this stage, and none of the other's.
        verdicts = sum(entry["what"] == "verdict" for entry in own)
        assert sum(count > 0 for count in wanted) - 1 <= verdicts <= sum(count > 0 for count in wanted)
        assert sum(entry["what"] == "finished" for entry in own) == 1


@pytest.mark.parametrize("length", ["fixed", "adaptive"])
def test_pages_of_a_stage_are_right_whoever_answered(
    drafter_paths: dict[str, Path], outsiders: Path, length: str
) -> None:
    """The target is its own draft model: what the first stage leaves to it must be accepted, with prompts in parts,
    cached prefixes and preemption. The first stage never drafts more than two tokens, so the third is the model's."""
    target = str(drafter_paths["target"])
    stages = {
        "sometimes": {"name": f"{outsiders}:NowAndThen"},
        "self": {"name": "draft_model", "path": target, "dtype": "float32", "length": length},
    }
    with LLM(
        model={"path": target, "dtype": "float32", "max_model_len": 128},
        cache={"num_blocks": 12, "block_size": 16},
        scheduler={"max_num_batched_tokens": 24, "max_num_seqs": 4},
        speculative=speculative(stages),
    ) as llm:
        preempted = 0
        for _ in range(2):
            outputs = llm.generate([PROMPTS[0] * 4, *PROMPTS], PARAMS, use_tqdm=False)
            preempted += sum(output.metrics.num_preemptions for output in outputs)
            third = [
                (output.metrics.drafted_per_position[2], output.metrics.accepted_per_position[2]) for output in outputs
            ]
            assert all(drafted == accepted > 0 for drafted, accepted in third)
        assert preempted > 0


def refusal(paths: dict[str, Path], **sections: dict[str, Any]) -> str:
    drafters = {label: {"num_tokens": 4, "length": "fixed"} | section for label, section in sections.items()}
    config = {"model": {"path": str(paths["target"])}, "speculative": {"drafters": drafters, "default": None}}
    explanation = explain(load_config(config))
    assert isinstance(explanation.refusal, ConfigError)
    return str(explanation.refusal)


def test_what_a_cascade_asks_of_others_follows_from_its_stages(drafter_paths: dict[str, Path]) -> None:
    """Only a stage with trees makes it propose trees, which a rule for chains is then refused for."""
    for tree in (False, True):
        stages = {"lookup": {"name": "ngram"}, "suffix": {"name": "suffix", "tree": tree}}
        config = {"model": {"path": str(drafter_paths["target"])}, "speculative": speculative(stages)}
        config["speculative"]["acceptance"] = "block"
        explanation = explain(load_config(config))
        assert (explanation.refusal is not None) == tree
        assert not tree or "BlockRule judges chains only" in str(explanation.refusal)
    eagle = {"name": "eagle", "path": str(drafter_paths["eagle"])}
    config["speculative"] = speculative({"lookup": {"name": "ngram"}, "eagle": eagle})
    resolved = explain(load_config(config)).resolved
    assert resolved is not None
    assert resolved.speculation is not None
    both = resolved.speculation.drafters["both"]
    assert both.kv_cache
    assert both.reads_next_token
    assert both.abilities.needs_hidden_states
    assert not both.abilities.stateless


@pytest.mark.parametrize(
    ("given", "most", "cut"), [(None, 12, []), (12, 12, []), (6, 6, ["head"]), (2, 2, ["lookup", "head"])]
)
def test_a_cascade_drafts_as_much_as_its_stages_or_says_whom_it_cuts(
    drafter_paths: dict[str, Path], given: int | None, most: int, cut: list[str]
) -> None:
    stages = {"lookup": {"name": "ngram", "num_tokens": 4}, "head": {"name": "recycling", "num_tokens": 12}}
    own = {"name": "cascade", "stages": [*stages]} | ({} if given is None else {"num_tokens": given})
    config = {"model": {"path": str(drafter_paths["target"])}, "speculative": {"drafters": {"both": own, **stages}}}
    explanation = explain(load_config(config))
    assert explanation.resolved is not None
    assert explanation.resolved.speculation is not None
    assert explanation.resolved.speculation.drafters["both"].num_tokens == most
    decided = [one.got for one in explanation.resolved.decisions if one.key == "speculative.drafters.both.num_tokens"]
    assert decided == ([most] if given is None else [])
    warned = [label for label in stages if any(f"its stage {label!r} up to" in one for one in explanation.warnings)]
    assert warned == cut


def test_stages_that_cannot_be_are_refused(drafter_paths: dict[str, Path]) -> None:
    lookup = {"name": "ngram"}
    draft = {"name": "draft_model", "path": str(drafter_paths["draft_model"])}
    cascade = {"name": "cascade", "stages": ["lookup", "look"]}
    assert "stage 'look' is no drafter of the config; did you mean 'lookup'" in refusal(
        drafter_paths, lookup=lookup, cascade=cascade
    )
    cascade = {"name": "cascade", "stages": ["draft", "lookup"]}
    assert "stage 'draft' draws its drafts" in refusal(drafter_paths, lookup=lookup, draft=draft, cascade=cascade)
    cascade = {"name": "cascade", "stages": ["lookup", "cascade"]}
    assert "asks it in turn (cascade -> cascade)" in refusal(drafter_paths, lookup=lookup, cascade=cascade)
    inner, outer = ({"name": "cascade", "stages": stages} for stages in (["lookup", "more"], ["inner", "lookup"]))
    found = refusal(drafter_paths, lookup=lookup, more=lookup, inner=inner, outer=outer)
    assert "stage 'inner' has stages itself (lookup, more): name these" in found
    cascade = {"name": "cascade", "stages": ["lookup", "lookup"]}
    assert "named twice" in refusal(drafter_paths, lookup=lookup, cascade=cascade)


def test_arms_keep_their_stages_where_the_config_has_no_default(drafter_paths: dict[str, Path]) -> None:
    """As an experiment with many drafters has none: which one requests get that name none is no question there."""
    drafters = {
        "lookup": {"name": "ngram"},
        "suffix": {"name": "suffix"},
        "spare": {"name": "ngram", "min_match": 1},
        "both": {"name": "cascade", "stages": ["lookup", "suffix"]},
    }
    layered = load_config({"model": {"path": str(drafter_paths["target"])}, "speculative": {"drafters": drafters}})
    cut = with_drafters(layered, {"arm": Written(layered, "both", {})})
    assert cut.config.speculative is not None
    assert cut.config.speculative.drafters.keys() == {"arm", "lookup", "suffix"}


class TestCascade(DraftWorkerSuite):
    """Over stages of the suite's."""

    plugin = CascadeDrafter
    options: ClassVar = {"stages": ["one", "other"]}
