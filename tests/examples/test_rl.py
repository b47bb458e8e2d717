"""examples/rl: trainer and engine agree on every log probability, before and after the weights changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dovetail.testing.story_model import save_story_model

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "rl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_story_model(folder)
    return folder


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A script, with its neighbour importable as when it is run."""
    import importlib

    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    yield importlib.import_module(request.param)
    for name in ("grpo", request.param):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("example", ["colocated", "two_processes"], indirect=True)
def test_the_engine_draws_from_what_the_trainer_has(example: Any, model: Path) -> None:
    steps = list(example.train(model, seed=0, num_steps=3, learning_rate=1e-3, strict=False))
    assert [step.weight_version for step in steps] == [0, 1, 2]
    assert max(step.max_difference for step in steps) < 1e-4
    assert all(0 <= step.reward <= 1 for step in steps)


@pytest.mark.parametrize("example", ["colocated"], indirect=True)
def test_with_the_same_kernels_there_is_no_difference(
    example: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["grpo"], "GROUP_SIZE", 2)
    steps = list(example.train(model, seed=0, num_steps=2, learning_rate=1e-3, strict=True))
    assert [step.max_difference for step in steps] == [0, 0]


@pytest.mark.parametrize("example", ["grpo"], indirect=True)
def test_rewards_and_advantages(example: Any) -> None:
    assert example.reward_of("dog. It ran to the big tree in the far away garden! He") == 2 / 3
    assert example.reward_of("") == 0
    assert example.advantages_of([1.0, 1.0, 1.0]) == [0, 0, 0]
    assert example.advantages_of([0.0, 1.0]) == pytest.approx([-1, 1], abs=1e-3)
