"""What others build on `dovetail.executors.processes`: it passes the suite, and an engine runs over it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import WorkerError
from dovetail.contracts.executor import Executor, ExecutorNeed, Placement
from dovetail.executors.processes import ProcessExecutor, ProcessOptions
from dovetail.testing.executor_suite import ProcessExecutorSuite
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.testing.toy_worker import Fault, ToySpec, expected_result, toy_plan

FILE = Path(__file__).with_name("dialling.py")


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dialling = _import_file(FILE)


@pytest.mark.nightly
class TestDiallingExecutor(ProcessExecutorSuite):
    plugin = dialling.DiallingExecutor


def started(plugin: type[ProcessExecutor], spec: ToySpec, **options: Any) -> Executor:
    executor = plugin(ProcessOptions(**options), spec, ExecutorNeed("cpu", tensor_parallel=2))
    executor.start()
    return executor


def test_the_last_rank_answers_and_each_has_a_node_of_its_own() -> None:
    executor = started(dialling.DiallingExecutor, ToySpec())
    placements: list[Placement] = executor.call("placement")
    executor.shutdown()
    assert [placement.tensor_rank for placement in placements] == [1, 0]
    assert [placement.answers for placement in placements] == [False, True]
    assert [placement.node for placement in placements] == [0, 1]


def test_a_worker_on_another_machine_has_its_own_import_path_and_no_files_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    hang = Fault("other", 0, "hang")
    executor = started(dialling.ElsewhereExecutor, ToySpec(faults=(hang,), all_reduce=True), step_timeout_s=0.5)
    assert all(str(tmp_path) not in path for path in executor.call("path"))
    error = executor.execute(toy_plan(0)).exception(timeout=60)
    assert isinstance(error, WorkerError)
    assert "on another machine" in str(error)
    assert "step 0 was not done after 0.5 s" in str(error)
    executor.shutdown()


def test_an_end_elsewhere_is_noticed() -> None:
    executor = started(dialling.ElsewhereExecutor, ToySpec(faults=(Fault("other", 1, "exit"),)))
    assert executor.execute(toy_plan(0)).result() == expected_result(toy_plan(0), 2)
    executor.execute(toy_plan(1))
    with pytest.raises(WorkerError, match=r"rank 0 \(on another machine\) exited with code 3"):
        run_steps(executor)
    executor.shutdown()


def run_steps(executor: Executor) -> None:
    while True:
        executor.execute(toy_plan(2)).result(timeout=60)


def test_a_process_that_cannot_be_reached_is_named_and_leaves_nothing() -> None:
    before = psutil.Process().children()
    with pytest.raises(WorkerError, match=r"worker rank 0 \(pid \d+\) cannot be reached: .*; it was killed by SIGKILL"):
        started(dialling.NobodyDials, ToySpec())
    assert set(psutil.Process().children()) <= set(before)


DRIVER = """
import importlib.util, sys
from dovetail.contracts.executor import ExecutorNeed
from dovetail.executors.processes import ProcessOptions
from dovetail.testing.toy_worker import Fault, ToySpec, toy_plan
spec = importlib.util.spec_from_file_location("dialling", sys.argv[1])
dialling = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dialling)
hang = Fault(0, 0, "hang", announce=sys.argv[2])
executor = getattr(dialling, sys.argv[3])(ProcessOptions(), ToySpec(faults=(hang,)), ExecutorNeed("cpu"))
executor.start()
print(*executor.call("pid"), flush=True)
executor.execute(toy_plan(0)).result()
"""


@pytest.mark.parametrize("executor", ["DiallingExecutor", "ElsewhereExecutor"])
def test_a_worker_that_hangs_ends_with_its_driver(executor: str, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = DRIVER.replace("announce=sys.argv[2]", "announce=__import__('pathlib').Path(sys.argv[2])")
    command = [sys.executable, "-c", script, str(FILE), str(fifo), executor]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        fifo.read_text()
        assert len(workers) == 1
        driver.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_an_engine_over_it_gives_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Sampled, with speculation and log probabilities: all that only the rank that answers does."""
    save_tiny_model(tmp_path, tiny_config("llama"))
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    params = [greedy, SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, logprobs=2)]
    prompts = [[7, 8, 9, 7, 8, 9, 7, 8], [100, 4, 33]]

    def run(executor: dict[str, Any], **more: Any) -> Any:
        sections = {
            "model": {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32"},
            "cache": {"num_blocks": 200},
            "executor": {"threads": 1, **executor},
        }
        with LLM(**sections, **more) as llm:
            return llm.generate(prompts, params, use_tqdm=False)

    drafters = {"it": {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"}}
    speculative = {"drafters": drafters, "default": "it"}
    outputs = run({"name": f"{FILE}:DiallingExecutor", "tensor_parallel": 2}, speculative=speculative)
    alone = run({"name": "cpu"})
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert len(outputs[1].outputs[0].logprobs) == 12
    assert outputs[0].metrics.num_accepted > 0
