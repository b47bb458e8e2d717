"""Executors that take many plans before the first is done: the tokens are those of one step at a time."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.engine.core import EngineCore
from dovetail.engine.step import Step
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

EXECUTORS = '''\
from dovetail.executors.gpu.executor import GPUExecutor
from dovetail.executors.multiproc import MultiprocExecutor


class Device(GPUExecutor):
    """Plans wait in the worker."""

    max_in_flight = 5


class Processes(MultiprocExecutor):
    """Plans wait in the pipes."""

    max_in_flight = 4
'''
DEVICES = [{"name": "Device", "device": "null", "null_order": order} for order in ("at once", "late", "early")]
PROMPTS = [[5, 9, 33, 70, 12], [100, 4], list(range(3, 60)), [7] * 20, [1, 2, 3], list(range(40, 90))]
MAX_MODEL_LEN = 80


def plain(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True} | params)


def to_the_end(prompt: list[int]) -> SamplingParams:
    """Up to the last token that the model can take."""
    return plain(temperature=0.9, seed=len(prompt), max_tokens=MAX_MODEL_LEN - len(prompt))


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma2", marks=pytest.mark.nightly)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny_model(directory, tiny_config(request.param))
    (directory / "deep.py").write_text(EXECUTORS)
    return directory


def tokens(directory: Path, executor: Any, params: list[SamplingParams], **more: Any) -> list[list[list[int]]]:
    if executor != "cpu":
        executor = executor | {"name": f"{directory}/deep.py:{executor['name']}"}
    sections: dict[str, Any] = {
        "model": {
            "path": str(directory),
            "tokenizer_mode": "none",
            "dtype": "float32",
            "operators": None,
            "max_model_len": MAX_MODEL_LEN,
        },
        "cache": {"block_size": 8, "num_blocks": 150},
        "attention": "reference",
        "executor": executor,
    }
    with LLM(**sections | more) as llm:
        outputs = llm.generate(PROMPTS[: len(params)], params)
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("executor", "swap_gib"),
    [
        (DEVICES[0], 0.01),
        (DEVICES[1], 0.0),
        (DEVICES[2], 0.01),
        ({"name": "Processes"}, 0.01),
        pytest.param(DEVICES[0], 0.0, marks=pytest.mark.nightly),
        pytest.param(DEVICES[1], 0.01, marks=pytest.mark.nightly),
        pytest.param(DEVICES[2], 0.0, marks=pytest.mark.nightly),
        pytest.param({"name": "Processes"}, 0.0, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_tokens_are_those_of_one_step_at_a_time(model: Path, executor: dict[str, str], swap_gib: float) -> None:
    """Short and long requests, chunks, stop tokens, and preemptions by recomputing and by swapping."""
    little = {
        "cache": {"block_size": 4, "num_blocks": 45 if "gemma" in str(model) else 26, "swap_gib": swap_gib},
        "scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 5},
    }
    stops = plain(temperature=0.8, seed=4, max_tokens=25, stop_token_ids=list(range(0, 128, 9)))
    params = [plain(), to_the_end(PROMPTS[1]), to_the_end(PROMPTS[2]), stops, plain(max_tokens=1), plain(max_tokens=3)]
    assert tokens(model, executor, params, **little) == tokens(model, "cpu", params, **little)


def test_completions_of_one_prompt_get_their_tokens_where_memory_is_short(model: Path) -> None:
    """The blocks that wait for siblings are given up while steps are in flight, and requests in these are preempted."""
    little = {
        "cache": {"block_size": 4, "num_blocks": 45 if "gemma" in str(model) else 26, "swap_gib": 0.0},
        "scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 5},
    }
    counts = [3, 2, 1, 3, 2, 3]
    params = [plain(temperature=0.9, seed=n + i, n=n, max_tokens=6 + 4 * i) for i, n in enumerate(counts)]
    assert tokens(model, DEVICES[0], params, **little) == tokens(model, "cpu", params, **little)


@pytest.mark.parametrize("executor", [DEVICES[1], {"name": "Processes"}], ids=str)
def test_as_many_plans_are_in_flight_as_the_executor_takes(
    model: Path, executor: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    land = EngineCore._land

    def watched(core: EngineCore) -> Any:
        depths.append(len(core._flights))
        return land(core)

    monkeypatch.setattr(EngineCore, "_land", watched)
    allows_another: Any = Step.allows_another.fget  # type: ignore[attr-defined]

    def though_it_may_be_done(step: Step) -> bool:
        return bool(allows_another(SimpleNamespace(future=Future(), schedule=step.schedule)))

    monkeypatch.setattr(Step, "allows_another", property(though_it_may_be_done))
    tokens(model, executor, [plain()] * 2, scheduler={"max_num_batched_tokens": 64, "max_num_seqs": 4})
    assert max(depths) == {"Device": 5, "Processes": 4}[executor["name"]]
