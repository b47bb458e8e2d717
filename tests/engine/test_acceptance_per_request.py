"""A request names one of several acceptance rules; one batch holds requests of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.errors import RequestError
from dovetail.engine.explanation import explain
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

PARAMS = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, speculation="wrong")
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13]]

PLUGINS = '''
from dovetail.contracts.speculation import AcceptanceCapabilities, AcceptanceRule, Draft, DraftCapabilities
from dovetail.contracts.speculation import DraftWorker, Verdict


class Fixed(DraftWorker):
    """Always the same tokens, as a chain or with a second child."""

    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True)

    def propose(self, batch):
        return [Draft([3, 3][: request.max_drafts]) for request in batch.requests]


class Trees(Fixed):
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True, trees=True)

    def propose(self, batch):
        return [Draft([3, 4], [-1, -1]) if request.max_drafts > 1 else None for request in batch.requests]


class Every(AcceptanceRule):
    """Accepts every draft, whatever the target says."""

    contract = (1, 0)
    capabilities = AcceptanceCapabilities(sampling=True, synthetic=True)

    def verify(self, requests):
        return [
            Verdict(range(len(request.draft.token_ids)), request.target.tokens()[len(request.draft.token_ids)])
            for request in requests
        ]


class Breaks(Every):
    def verify(self, requests):
        raise RuntimeError("no verdict")
'''


def config(directory: Path, **speculative: Any) -> dict[str, Any]:
    fixed = {"num_tokens": 2, "length": "fixed"}
    plugins = directory / "plugins.py"
    return {
        "model": {"path": str(directory / "model"), "tokenizer_mode": "none", "dtype": "float32"},
        "cache": {"num_blocks": 64, "block_size": 16},
        "speculative": {
            "drafters": {
                "wrong": {"name": f"{plugins}:Fixed", **fixed},
                "trees": {"name": f"{plugins}:Trees", **fixed},
            },
            "default": None,
            "rules": {
                "every": f"{plugins}:Every",
                "broken": {"name": f"{plugins}:Breaks"},
                "greedy": "greedy",
                "typical": {"name": "typical", "epsilon": 0.5},
            },
            **speculative,
        },
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rules")
    save_tiny_model(directory / "model", tiny_config("llama"))
    (directory / "plugins.py").write_text(PLUGINS)
    return directory


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(**config(directory)) as llm:
        yield llm


def test_each_request_of_a_batch_is_judged_by_the_rule_that_it_names(llm: LLM) -> None:
    named = [replace(PARAMS, seed=7, acceptance=rule) for rule in (None, "every", None, "every")]
    outputs = llm.generate([PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]], named, use_tqdm=False)
    plain = llm.generate(PROMPTS, replace(PARAMS, seed=7, speculation="off"), use_tqdm=False)
    # The drafts were not drawn, so a seeded request keeps its tokens under the lossless default.
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [one.outputs[0].token_ids for one in plain]
    for output in (outputs[1], outputs[3]):
        assert output.metrics.num_accepted == output.metrics.num_drafted > 0
        # Two drafts and a token of the target, round after round, behind the first token.
        assert list(output.outputs[0].token_ids)[1:3] == [3, 3]


def test_a_rule_that_breaks_costs_its_own_requests_their_drafter_alone(llm: LLM) -> None:
    params = [replace(PARAMS, seed=3, acceptance=rule) for rule in ("broken", "every")]
    broken, other = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
    assert "acceptance rule Breaks failed: RuntimeError: no verdict" in str(broken.metrics.drafter_error)
    assert other.metrics.drafter_error is None
    (plain,) = llm.generate([PROMPTS[0]], replace(PARAMS, seed=3, speculation="off"), use_tqdm=False)
    assert broken.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"acceptance": "evry"},
            "acceptance 'evry' is no acceptance rule that requests may name; did you mean 'every'",
        ),
        ({"acceptance": "every", "speculation": "off"}, "no drafter guesses for the request: leave it out"),
        ({"acceptance": "greedy"}, "acceptance rule 'greedy' serves temperature 0 only"),
        ({"acceptance": "every", "speculation": "trees"}, "judges chains only, and the drafter 'trees' proposes trees"),
        ({"acceptance": 3}, "acceptance must be None or an acceptance rule's name"),
    ],
)
def test_what_cannot_be_is_refused(llm: LLM, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPTS, replace(PARAMS, **changes), use_tqdm=False)


def test_the_default_rule_goes_by_its_name_too(directory: Path) -> None:
    with LLM(**config(directory, acceptance="rejection", rules={"rejecting": "greedy"})) as llm:
        params = [replace(PARAMS, seed=7, acceptance=rule) for rule in (None, "rejection")]
        unnamed, named = llm.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
        assert named.outputs[0].token_ids == unnamed.outputs[0].token_ids
        assert named.metrics.num_drafted > 0
        with pytest.raises(RequestError, match="did you mean 'rejection'"):
            llm.generate(PROMPTS, replace(PARAMS, acceptance="rejectio"), use_tqdm=False)
        with pytest.raises(RequestError, match="no drafter guesses"):
            llm.generate(PROMPTS, replace(PARAMS, acceptance="rejection", speculation="off"), use_tqdm=False)


def test_a_label_of_the_config_comes_before_the_default_rules_name(directory: Path) -> None:
    rules = {"rejection": f"{directory}/plugins.py:Every"}
    with LLM(**config(directory, acceptance="rejection", rules=rules)) as llm:
        (output,) = llm.generate([PROMPTS[0]], replace(PARAMS, seed=7, acceptance="rejection"), use_tqdm=False)
    assert output.metrics.num_accepted == output.metrics.num_drafted > 0


def test_a_rule_is_refused_where_none_is_configured(directory: Path) -> None:
    explanation = explain(load_config(config(directory, rules={})))
    assert "acceptance rules by name (speculative.rules is empty)" in explanation.refused_requests
    explanation = explain(load_config(config(directory) | {"reproducibility": "strict"}))
    assert "speculative.rules.every" in str(explanation.refusal)
    assert "strict" in str(explanation.refusal)
