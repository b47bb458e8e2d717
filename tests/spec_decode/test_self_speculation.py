"""The target drafts with some of its own layers. Where those that it leaves out do nothing, every draft is right:
whatever is wrong with pages, positions or distributions costs acceptance, and nothing else would show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment
from dovetail.spec_decode.self_speculation import SelfSpeculationDrafter, SelfSpeculationOptions
from dovetail.testing.draft_suite import DraftWorkerSuite
from dovetail.testing.tiny_models import save_tiny_model, tiny_config, tiny_model

from .conftest import greedy

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [[5, 9, 13, 5, 9, 13, 5, 20, 21], [40, 41, 42], [99, 3], [7] * 30]
ASTRAY = '''
from dovetail.spec_decode.self_speculation import SelfSpeculationDrafter


class Astray(SelfSpeculationDrafter):
    """Runs a pass of `count` rows (0: as many as drafts are wanted), `away` positions behind the last known token."""

    away, count, other = 0, 1, 0

    def propose(self, batch):
        request = batch.requests[0]
        start = len(request.token_ids) - 1 + self.away
        count = self.count or request.max_drafts
        self.setup.target.run([request.seq_id + self.other], [start], [count], [3] * count, {1})
        return [None] * len(batch.requests)


class Back(Astray):
    away = -1


class Beyond(Astray):
    count = 5


class Gap(Astray):
    away = 1


class Stranger(Astray):
    other = 1000


class Four(Astray):
    count = 4


class Within(Astray):
    count = 0
'''


class TestSelfSpeculation(DraftWorkerSuite):
    plugin = SelfSpeculationDrafter
    options: ClassVar[Mapping[str, Any]] = {"skip_layers": [1, 2]}


class TestEarlyExit(DraftWorkerSuite):
    plugin = SelfSpeculationDrafter
    options: ClassVar[Mapping[str, Any]] = {"exit_layer": 2, "stop_below": 0.05}
    num_draws = 800


def save(directory: Path, idle: tuple[int, ...] = (), **config: Any) -> Any:
    """A tiny model of four layers, of which `idle` add nothing to their input."""
    config = tiny_config("llama", num_hidden_layers=4, **config)
    model: Any = tiny_model(config)
    with torch.no_grad():
        for index in idle:
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
    model.save_pretrained(directory)
    return model


def create(directory: Path, name: str = "self_speculation", **sections: Any) -> LLM:
    drafter = {"name": name, "num_tokens": 4, "length": "fixed"} | sections.pop("drafter")
    return LLM(
        model={"path": str(directory), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64}
        | sections.pop("model", {}),
        cache={"block_size": 4, "num_blocks": 300} | sections.pop("cache", {}),
        speculative={"drafters": {"it": drafter}},
        **sections,
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 12, "max_num_seqs": 2}},
    "preemption": {"cache": {"num_blocks": 24}},
    "swapping": {"cache": {"num_blocks": 24, "swap_gib": 0.1}},
    "adaptive": {"drafter": {"length": "adaptive"}},
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("settings", SETTINGS)
def test_layers_that_do_nothing_are_not_missed(tmp_path: Path, settings: str, temperature: float) -> None:
    save(tmp_path, idle=(1, 2))
    sections = dict(SETTINGS[settings])
    drafter = {"skip_layers": [1, 2]} | sections.pop("drafter", {})
    params = replace(PARAMS, temperature=temperature, seed=3 if temperature else None)
    with create(tmp_path, drafter=drafter, **sections) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        again = llm.generate(PROMPTS, replace(params, n=2, best_of=2) if temperature else params, use_tqdm=False)
        assert llm.engine.cache_statistics().num_used_blocks == 0
    for output in [*outputs, *again]:
        assert output.metrics.drafter_error is None
        # Drafts of seeded requests are not drawn where the length adapts.
        if settings != "adaptive" or not temperature:
            assert output.metrics.num_accepted == output.metrics.num_drafted
    assert settings == "adaptive" or sum(output.metrics.num_drafted for output in outputs) > 40
    if settings in ("preemption", "swapping"):
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("drafter", [{"skip_layers": [0, 2]}, {"exit_layer": 1}])
def test_what_drafts_wrote_changes_no_token(tmp_path: Path, drafter: dict[str, Any]) -> None:
    """Random layers: most drafts are wrong, and their keys and values must not be read."""
    model = save(tmp_path)
    expected = [greedy(model, prompt, 20) for prompt in PROMPTS]
    with create(tmp_path, drafter=drafter, cache={"num_blocks": 24}) as llm:
        for _ in range(2):  # the second time with cached prefixes
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert sum(output.metrics.num_drafted for output in outputs) > 40


def test_it_drafts_as_a_stage_of_another_drafter(tmp_path: Path) -> None:
    """The slots that it writes to are there, and what the stage before it guessed does no harm."""
    model = save(tmp_path)
    own = {"name": "self_speculation", "num_tokens": 4, "length": "fixed", "skip_layers": [1]}
    lookup = {"name": "recycling", "num_tokens": 4, "length": "fixed", "tree": False, "share": False}
    cascade = {"name": "cascade", "num_tokens": 4, "length": "fixed", "stages": ["lookup", "own"]}
    with LLM(
        model={"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
        cache={"block_size": 4, "num_blocks": 24},
        speculative={"drafters": {"own": own, "lookup": lookup, "it": cascade}, "default": "it"},
    ) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [greedy(model, prompt, 20) for prompt in PROMPTS]
    assert all(output.metrics.drafter_error is None for output in outputs)
    assert sum(output.metrics.num_drafted for output in outputs) > 40


@pytest.mark.parametrize("as_stage", [False, True])
@pytest.mark.parametrize(
    ("name", "max_tokens", "message"),
    [
        ("Back", 20, "it may write from 9 to 12"),
        ("Beyond", 20, "positions 9 to 13 of a request of which 10 tokens are known; it may write from 9 to 12"),
        # Two more tokens fit behind the first, and a round yields one by itself: one draft is asked for.
        ("Four", 3, "it may write from 9 to 9"),
        ("Gap", 20, "has written none from 9 on"),
        ("Stranger", 20, "none of its batch"),
        ("Within", 20, None),
    ],
)
def test_positions_that_are_not_the_drafters_are_refused(
    tmp_path: Path, name: str, max_tokens: int, message: str | None, as_stage: bool
) -> None:
    model = save(tmp_path)
    (tmp_path / "astray.py").write_text(ASTRAY)
    fixed = {"num_tokens": 4, "length": "fixed"}
    drafters: dict[str, Any] = {"own": {"name": f"{tmp_path}/astray.py:{name}", "skip_layers": [1], **fixed}}
    if as_stage:
        drafters |= {"lookup": {"name": "ngram", "min_match": 30, "max_match": 30, **fixed}}
        drafters |= {"it": {"name": "cascade", "stages": ["lookup", "own"], **fixed}}
    with LLM(
        model={"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
        cache={"block_size": 4, "num_blocks": 24},
        speculative={"drafters": drafters},
    ) as llm:
        (output,) = llm.generate([PROMPTS[0]], replace(PARAMS, max_tokens=max_tokens), use_tqdm=False)
    error = output.metrics.drafter_error
    assert error is None if message is None else message in str(error)
    assert output.outputs[0].token_ids == greedy(model, PROMPTS[0], max_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 4}, "the target has 4 layers"),
        ({"skip_layers": [1, 4]}, "skip_layers names 4, and the target has layers 0 to 3"),
        ({"skip_layers": [0, 1, 2, 3]}, "names all 4 layers"),
    ],
)
def test_layers_that_cannot_be_left_out_are_refused(options: dict[str, Any], message: str) -> None:
    need = TestEarlyExit().need()
    chosen = SelfSpeculationOptions.model_validate(options)
    (reason,) = SelfSpeculationDrafter.check(need, chosen, Environment("cpu", 1, 2**30))
    assert message in reason


@pytest.mark.parametrize("options", [{}, {"skip_layers": []}, {"skip_layers": [1], "exit_layer": 1}])
def test_one_choice_of_layers_is_given(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SelfSpeculationOptions.model_validate(options)


def test_a_target_over_several_ranks_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match="on up to 1 tensor-parallel rank, not 2"):
        create(tmp_path, drafter={"skip_layers": [1]}, executor={"tensor_parallel": 2})


def test_a_family_that_leaves_out_no_layers_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("gemma2"))
    with pytest.raises(ConfigError, match="model family runs all or none"):
        create(tmp_path, drafter={"skip_layers": [1]})
