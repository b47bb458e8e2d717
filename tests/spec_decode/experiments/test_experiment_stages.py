"""Arms whose drafters ask others, and arms that name an acceptance rule, in one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.arms import Setup, prepare
from dovetail.spec_decode.experiments.schema import parse_experiment
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

DRAFTERS: dict[str, Any] = {"lookup": {"name": "ngram"}, "answers": {"name": "suffix"}}
CASCADE = {"name": "cascade", "stages": ["lookup", "answers"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, tiny_config("llama"))
    return directory


def plan(model: Path, arms: dict[str, Any], **speculative: Any) -> Setup:
    config = {
        "model": {"path": str(model), "tokenizer_mode": "none"},
        "speculative": {"drafters": DRAFTERS, "default": None, **speculative},
    }
    experiment = parse_experiment({"config": config, "arms": arms, "sampling": {"temperature": 0.7}}, "e.yaml")
    return prepare(experiment, model, allow=False)


def test_an_arm_brings_the_stages_of_its_drafter_along(model: Path) -> None:
    arms = {"both": {"drafter": CASCADE, "num_tokens": 3}, "lookup": {"drafter": "lookup", "num_tokens": 3}}
    (engine,) = plan(model, arms).engines
    assert engine.resolved.speculation is not None
    drafters = engine.resolved.speculation.drafters
    assert set(drafters) == {"both-at-3", "lookup-at-3", "lookup", "answers"}
    assert drafters["both-at-3"].stages == ("lookup", "answers")


def test_stages_of_one_name_that_differ_are_refused(model: Path) -> None:
    other = {"speculative": {"drafters": {"lookup": {"name": "ngram", "max_match": 7}}}}
    arms = {"one": {"drafter": CASCADE}, "two": {"drafter": CASCADE, "num_tokens": 2, "config": other}}
    with pytest.raises(ConfigError, match=r"the stage 'lookup' of .* is another drafter elsewhere in the experiment"):
        plan(model, arms)


def test_arms_that_differ_in_the_rule_of_their_requests_share_an_engine(model: Path) -> None:
    rules = {"block": "block", "plausible": {"name": "typical", "epsilon": 0.2}}
    arms = {
        "rejection": {"drafter": "answers", "num_tokens": 4},
        "block": {"drafter": "answers", "num_tokens": 4, "acceptance": "block"},
        "plausible": {"drafter": "answers", "num_tokens": 4, "acceptance": "plausible"},
    }
    setup = plan(model, arms, rules=rules)
    assert len(setup.engines) == 1
    assert {variant.acceptance for variant in setup.engines[0].variants} == {None, "block", "plausible"}
    assert {name: arm.is_lossless for name, arm in setup.arms.items() if name in arms} == {
        "rejection": True,
        "block": True,
        "plausible": False,
    }


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"drafter": "answers", "acceptance": "blok"}, "'blok' is not among config.speculative.rules; did you mean"),
        ({"drafter": "off", "acceptance": "block"}, "the arm drafts nothing"),
        ({"drafter": "answers", "acceptance": "greedy"}, "serves temperature 0 only"),
    ],
)
def test_rules_that_an_arm_cannot_have_are_refused(model: Path, arm: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(model, {"arm": arm}, rules={"block": "block", "greedy": "greedy"})
