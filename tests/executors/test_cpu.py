"""The `cpu` executor: the suite, and what is its own."""

import pytest
import torch

from dovetail.contracts.executor import ExecutorNeed
from dovetail.contracts.plugin import Environment
from dovetail.executors.cpu import CPUExecutor, CPUOptions
from dovetail.testing.executor_suite import ExecutorSuite
from dovetail.testing.toy_worker import ToySpec, toy_plan


class TestCPUExecutor(ExecutorSuite):
    executor_class = CPUExecutor


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


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (ExecutorNeed("cuda"), "the device is cuda"),
        (ExecutorNeed("cpu", tensor_parallel=2), "use multiproc"),
        (ExecutorNeed("cpu", pipeline_parallel=2), "pipeline_parallel=2"),
    ],
)
def test_refusals_say_why(need: ExecutorNeed, reason: str) -> None:
    environment = Environment(need.device_type, num_cpus=8, memory_bytes=1 << 33)
    (answer,) = CPUExecutor.check(need, CPUOptions(), environment)
    assert reason in answer
    assert CPUExecutor.check(ExecutorNeed("cpu"), CPUOptions(), environment) == []
