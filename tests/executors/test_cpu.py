"""The `cpu` executor: the suite, and what is its own."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pydantic import ValidationError

from dovetail.contracts.executor import ExecutorNeed, ThreadCount
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.executors.cpu import CPUExecutor, CPUOptions
from dovetail.testing.executor_suite import ExecutorSuite
from dovetail.testing.toy_worker import ToySpec, toy_plan


class TestCPUExecutor(ExecutorSuite):
    plugin = CPUExecutor


def test_a_step_is_done_when_execute_returns() -> None:
    executor = CPUExecutor(CPUOptions(), ToySpec(), ExecutorNeed("cpu"))
    executor.start()
    assert executor.execute(toy_plan(0)).done()
    executor.shutdown()


@pytest.mark.parametrize(("option", "spec", "threads"), [(None, 3, 3), (2, 3, 2), (2, None, 2)])
def test_threads_hold_until_shutdown(option: int | None, spec: int | None, threads: int) -> None:
    before = torch.get_num_threads()
    executor = CPUExecutor(CPUOptions(threads=option), ToySpec(num_threads=spec), ExecutorNeed("cpu"))
    executor.start()
    assert torch.get_num_threads() == threads
    executor.shutdown()
    assert torch.get_num_threads() == before


def test_threads_are_known_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    need, environment = ExecutorNeed("cpu"), Environment("cpu", num_cpus=8, memory_bytes=1 << 33)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert CPUExecutor.threads(need, CPUOptions(), environment) == ThreadCount(5, "OMP_NUM_THREADS")
    assert CPUExecutor.threads(need, CPUOptions(cores="0-2"), environment).count == 3


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (ExecutorNeed("cuda"), "runs on cpu, not on cuda"),
        (ExecutorNeed("cpu", tensor_parallel=2), "tensor_parallel up to 1, not 2"),
        (ExecutorNeed("cpu", pipeline_parallel=2), "pipeline_parallel up to 1, not 2"),
    ],
)
def test_refusals_say_why(need: ExecutorNeed, reason: str) -> None:
    environment = Environment(need.device_type, num_cpus=8, memory_bytes=1 << 33)
    (answer,) = reasons_against(CPUExecutor, need, CPUOptions(), environment)
    assert reason in answer
    assert reasons_against(CPUExecutor, ExecutorNeed("cpu"), CPUOptions(), environment) == []


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to cores on Linux only")


@needs_linux
def test_the_thread_that_runs_steps_keeps_to_its_cores_until_shutdown() -> None:
    usable = os.sched_getaffinity(0)
    core = max(usable)
    executor = CPUExecutor(CPUOptions(cores=str(core)), ToySpec(), ExecutorNeed("cpu"))
    executor.start()
    assert torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == usable, "threads that it starts would inherit less"
    with ThreadPoolExecutor(1) as engine:
        engine.submit(executor.execute, toy_plan(0)).result()
        assert engine.submit(executor.call, "cores").result() == [{core}]
        assert os.sched_getaffinity(0) == usable
        executor.shutdown()
        assert engine.submit(os.sched_getaffinity, 0).result() == usable


@needs_linux
def test_whichever_thread_runs_steps_is_bound() -> None:
    usable = os.sched_getaffinity(0)
    core = max(usable)
    executor = CPUExecutor(CPUOptions(cores=str(core)), ToySpec(), ExecutorNeed("cpu"))
    executor.start()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for step_id, (runs, rests) in enumerate([(one, other), (other, one), (one, other)]):
            runs.submit(executor.execute, toy_plan(step_id)).result()
            assert runs.submit(os.sched_getaffinity, 0).result() == {core}
            assert rests.submit(os.sched_getaffinity, 0).result() == usable
        executor.shutdown()


@needs_linux
def test_cores_that_this_process_may_not_use_are_refused() -> None:
    environment = Environment("cpu", num_cpus=8, memory_bytes=1 << 33)
    foreign = max(os.sched_getaffinity(0)) + 1
    (answer,) = reasons_against(
        CPUExecutor, ExecutorNeed("cpu"), CPUOptions(cores=f"{foreign}-{foreign + 1}"), environment
    )
    assert f"names {foreign},{foreign + 1}, and this process may use" in answer


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "0-", "-1"])
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="no list of cores such as"):
        CPUOptions(cores=text)
