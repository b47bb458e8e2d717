"""Schedulers as other people write them in one file. Those of a distribution are in examples/plugins."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import LLM, SamplingParams
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.testing.faults import run_test
from dovetail.testing.scheduler_simulation import SchedulerSimulation
from dovetail.testing.scheduler_suite import LIMITS, SchedulerSuite
from dovetail.testing.scheduler_traffic import random_simulation, run_random_traffic
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "schedulers"


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHORTEST = load("shortest_remaining").ShortestRemainingFirst


class TestShortestRemainingFirst(SchedulerSuite):
    plugin = SHORTEST


def test_random_traffic() -> None:
    @settings(max_examples=25, deadline=None)
    @given(rng=st.randoms(use_true_random=False))
    def check(rng: Any) -> None:
        run_random_traffic(random_simulation(lambda limits: SHORTEST(PluginOptions(), limits), rng), rng)

    check()


def simulate(kind: Any, **options: Any) -> SchedulerSimulation:
    """One request runs at a time."""
    limits = SchedulerLimits(max_num_batched_tokens=16, max_num_seqs=1, max_model_len=64)
    return SchedulerSimulation(kind(kind.Options(**options), limits), limits, num_blocks=200)


def test_the_shortest_remaining_runs_first() -> None:
    simulation = simulate(SHORTEST)
    long, short, middle = (simulation.add([1], num_output) for num_output in (20, 3, 9))
    simulation.run()
    assert simulation.finished == [short, middle, long]


def test_what_a_scheduler_reads_of_the_user_cannot_be_written() -> None:
    simulation = SchedulerSimulation(SHORTEST(PluginOptions(), LIMITS), LIMITS)
    given = {"tenant": "a"}
    sequence = simulation.add([1], 2, sampling=SamplingParams(extra=given))
    given["tenant"] = "b"
    assert dict(sequence.extra) == {"tenant": "a"}
    with pytest.raises(TypeError):
        sequence.extra["tenant"] = "c"  # type: ignore[index]


def test_the_scheduler_of_the_guide_is_whole() -> None:
    """The first example of the page on schedulers passes the suite as printed, and its order is the one it names."""
    guide = (EXAMPLES.parents[1] / "docs" / "writing" / "schedulers.md").read_text(encoding="utf-8")
    (block,) = (part for part in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "BatchingScheduler)" in part)
    names: dict[str, Any] = {}
    exec(block, names)
    kind = names["ShortestPromptFirst"]
    simulation = simulate(kind)
    long, short = simulation.add([1] * 9, 2), simulation.add([2] * 3, 2)
    simulation.run()
    assert simulation.finished == [short, long]
    for test in ("test_declares_its_contract", "test_requests_share_steps", "test_long_prompt_is_chunked"):
        assert run_test(SchedulerSuite, test, plugin=kind).passed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_model(directory, tiny_config("llama"))
    return str(directory)


def test_the_engine_takes_it_from_its_file(model: str) -> None:
    sections: dict[str, Any] = {
        "model": {"path": model, "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 48},
        "cache": {"block_size": 4, "num_blocks": 16},
        "executor": {"threads": 1},
    }
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 9, 3)]
    prompts = [[3, 5, 7, 11, 13], [2, 4], [17] * 20]
    with LLM(**sections) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(**sections, scheduler=f"{EXAMPLES}/shortest_remaining.py:ShortestRemainingFirst") as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
