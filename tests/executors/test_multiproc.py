"""The `multiproc` executor: the suite with real processes, and what is its own."""

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.contracts.errors import PluginError, WorkerError
from dovetail.contracts.executor import ExecutorNeed, Placement
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.contracts.step import StepResult
from dovetail.executors.multiproc import MultiprocExecutor, MultiprocOptions
from dovetail.executors.processes import _supervisor
from dovetail.executors.processes._operations import Timeouts
from dovetail.testing.executor_suite import ProcessExecutorSuite
from dovetail.testing.toy_worker import Fault, ToySpec, expected_result, toy_plan


class TestMultiprocExecutor(ProcessExecutorSuite):
    plugin = MultiprocExecutor


def create(spec: ToySpec | None = None, tensor_parallel: int = 1, **options: float | str | None) -> MultiprocExecutor:
    need = ExecutorNeed("cpu", tensor_parallel=tensor_parallel)
    return MultiprocExecutor(MultiprocOptions.model_validate(options), spec or ToySpec(), need)


def look_once(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """After a deadline the workers are looked at until all of these words are true of them: on a busy machine they, or
    the test, may not be so far by then."""
    look_at = _supervisor.look_at

    def look(*arguments: Any) -> Any:
        while True:
            seen = look_at(*arguments)
            told = "; ".join(map(str, seen))
            if all(word in told for word in words):
                return seen

    monkeypatch.setattr(_supervisor, "look_at", look)


def stop(process: psutil.Process) -> None:
    """Returns once the process stands still."""
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass


def test_one_rank_runs_in_another_process_without_rendezvous() -> None:
    executor = create()
    executor.start()
    assert executor.call("pid") != [os.getpid()]
    assert executor.call("placement") == [Placement(device="cpu")]
    executor.shutdown()


def test_the_environment_of_the_driver_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = dict(os.environ)
    executor = create(threads=1)
    executor.start()
    assert executor.call("torch_threads") == [1]
    assert dict(os.environ) == before
    executor.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are bound to cores on Linux only")
def test_each_worker_keeps_to_its_share_of_the_cores() -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("one core cannot be shared")
    executor = create(tensor_parallel=2, cores=f"{usable[0]},{usable[1]}")
    executor.start()
    assert executor.call("cores") == [{usable[0]}, {usable[1]}]
    assert executor.call("torch_threads") == [1, 1]
    assert sorted(os.sched_getaffinity(0)) == usable
    executor.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are bound to cores on Linux only")
def test_fewer_cores_than_workers_are_refused() -> None:
    core = min(os.sched_getaffinity(0))
    environment = Environment("cpu", num_cpus=8, memory_bytes=1 << 33)
    need = ExecutorNeed("cpu", tensor_parallel=2)
    (answer,) = reasons_against(MultiprocExecutor, need, MultiprocOptions(cores=str(core)), environment)
    assert "1 cores for 2 workers" in answer


def test_ctrl_c_is_left_to_the_driver() -> None:
    executor = create()
    executor.start()
    os.kill(executor.call("pid")[0], signal.SIGINT)
    assert executor.call("ping") == [0]
    executor.shutdown()


def test_an_error_carries_the_traceback_of_the_worker() -> None:
    executor = create(ToySpec(faults=(Fault(0, 0, "raise", ValueError("bad page")),)))
    executor.start()
    error = executor.execute(toy_plan(0)).exception()
    assert error is not None
    assert isinstance(error.__cause__, ValueError)
    assert "toy_worker.py" in error.__cause__.__notes__[0]
    executor.shutdown()


def test_an_answer_that_does_not_pickle_is_an_error_of_the_call() -> None:
    executor = create()
    executor.start()
    with pytest.raises(TypeError, match="pickle"):
        executor.call("unpicklable")
    with pytest.raises(TypeError, match="pickle"):
        executor.call("raise", threading.Lock())
    assert executor.call("ping") == [0]
    executor.shutdown()


def test_start_gives_up_after_its_timeout() -> None:
    before = psutil.Process().children()
    executor = create(ToySpec(faults=(Fault(0, "load", "hang"),)), start_timeout_s=0.5)
    with pytest.raises(WorkerError, match=r"worker rank 0 .*start_timeout_s"):
        executor.start()
    assert set(psutil.Process().children()) <= set(before)


def test_an_executor_that_is_forgotten_stops_its_workers() -> None:
    executor = create()
    executor.start()
    process = psutil.Process(executor.call("pid")[0])
    del executor
    gc.collect()
    assert not process.is_running()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_worker_is_named_after_the_deadline(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_once(monkeypatch, "is stopped", "last began step 1")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    fault = Fault(victim, 1, "hang", announce=fifo)
    spec = ToySpec(faults=(fault,), all_reduce=True, num_threads=1)
    executor = create(spec, tensor_parallel=2, step_timeout_s=0.5)
    executor.start()
    processes = [psutil.Process(pid) for pid in executor.call("pid")]
    executor.execute(toy_plan(0)).result()
    future = executor.execute(toy_plan(1))
    fifo.read_text()
    stop(processes[victim])
    error = future.exception(timeout=60)
    assert isinstance(error, WorkerError)
    assert error.rank == victim
    assert f"worker rank {victim} (pid {processes[victim].pid}) is stopped" in str(error)
    assert "last began step 1" in str(error)
    assert "step_timeout_s" in str(error)
    assert f"rank {1 - victim}" in str(error)
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    with pytest.raises(WorkerError, match="is stopped"):
        executor.call("ping")
    executor.shutdown()


def test_a_worker_that_hangs_in_its_own_code_is_told_from_one_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_once(monkeypatch, "is in wait (", "torch/distributed")
    spec = ToySpec(faults=(Fault(1, 0, "hang"),), all_reduce=True, num_threads=1)
    executor = create(spec, tensor_parallel=2, step_timeout_s=0.5)
    executor.start()
    error = executor.execute(toy_plan(0)).exception(timeout=60)
    assert isinstance(error, WorkerError)
    assert error.rank == 1
    assert "is in wait (" in str(error)
    assert "torch/distributed" in str(error).split("; ")[-1]  # where rank 0 waits
    executor.shutdown()


def test_a_call_that_hangs_has_a_deadline() -> None:
    executor = create(start_timeout_s=10.0)
    executor.start()
    stop(psutil.Process(executor.call("pid")[0]))
    supervisor = executor._supervisor
    assert supervisor is not None
    supervisor._timeouts = Timeouts(0.5, None)  # 10 s are for loading
    with pytest.raises(WorkerError, match=r"rank 0 .* is stopped .*call 'ping' was not done .*start_timeout_s"):
        executor.call("ping")
    executor.shutdown()


def test_a_step_fails_at_its_deadline_though_the_workers_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at(*_: object) -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(_supervisor, "look_at", look_at)
    executor = create(ToySpec(faults=(Fault(0, 0, "hang"),)), step_timeout_s=0.5)
    executor.start()
    error = executor.execute(toy_plan(0)).exception(timeout=60)
    assert isinstance(error, WorkerError)
    assert "watching the workers during step 0 failed: RuntimeError('no such file')" in str(error)
    assert str(error.__cause__) == "no such file"
    executor.shutdown()


def test_an_operation_that_ends_while_it_is_looked_at_leaves_the_next_one_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = create(ToySpec(step_seconds=2.0, faults=(Fault(0, 1, "hang"),)), step_timeout_s=0.5)
    executor.start()
    look_at, begun = _supervisor.look_at, Future[Future[StepResult]]()

    def slow(*arguments: Any) -> Any:
        begun.result(60).result()
        return look_at(*arguments)

    monkeypatch.setattr(_supervisor, "look_at", slow)
    first = executor.execute(toy_plan(0))
    begun.set_result(first)
    error = executor.execute(toy_plan(1)).exception(timeout=60)
    assert first.result() == expected_result(toy_plan(0), 1)
    assert "step 1 was not done after 0.5 s" in str(error)
    executor.shutdown()


def test_without_a_deadline_a_step_may_take_any_time(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    executor = create(ToySpec(faults=(Fault(0, 0, "hang", announce=fifo),)), step_timeout_s=None)
    executor.start()
    future = executor.execute(toy_plan(0))
    fifo.read_text()
    with pytest.raises(TimeoutError):
        future.result(timeout=2.0)
    executor.shutdown()


def test_a_fork_of_the_driver_cannot_reach_the_workers_nor_end_them(tmp_path: Path) -> None:
    executor = create()
    executor.start()
    told = tmp_path / "told"
    child = os.fork()
    if child == 0:
        for attempt in (lambda: executor.execute(toy_plan(0)), lambda: executor.call("ping")):
            try:
                attempt()
            except WorkerError as error:
                told.write_text(f"{told.read_text() if told.exists() else ''}{error}\n")
        executor.shutdown()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    first, second = told.read_text().splitlines()
    assert first == second
    assert "forked off it" in first
    assert executor.execute(toy_plan(0)).result() == expected_result(toy_plan(0), 1)
    assert Path(executor._supervisor._scratch).is_dir()  # type: ignore[union-attr]
    executor.shutdown()


FORKING_SPEC = """
import os
from dataclasses import dataclass
from dovetail.testing.toy_worker import ToySpec

@dataclass(frozen=True)
class ForkingSpec(ToySpec):
    fifo: str = ""

    def create(self, placement):
        if os.fork() == 0:
            open(self.fifo).close()
            os._exit(0)
        return super().create(placement)
"""


def test_a_death_shows_though_a_child_of_the_worker_holds_its_pipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "forking_spec.py").write_text(FORKING_SPEC)
    monkeypatch.syspath_prepend(str(tmp_path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    executor = create(importlib.import_module("forking_spec").ForkingSpec(fifo=str(fifo)))
    executor.start()
    (pid,) = executor.call("pid")
    os.kill(pid, signal.SIGKILL)
    # More plans than fit into a pipe that nobody reads any more: sending must not block for ever either.
    with pytest.raises(WorkerError, match="SIGKILL"):
        [executor.execute(toy_plan(step_id, num_requests=1000)) for step_id in range(1000)][-1].result()
    executor.shutdown()
    fifo.write_text("")


class _LocalSpec(ToySpec):
    """Of this test module, which workers cannot import by its name."""


def test_a_spec_that_workers_cannot_import_is_refused_with_the_reason() -> None:
    _LocalSpec.__module__ = "__main__"
    sys.modules["__main__"].__dict__["_LocalSpec"] = _LocalSpec
    try:
        with pytest.raises(PluginError, match=r"rank 0 on host .* must be importable"):
            create(_LocalSpec()).start()
    finally:
        del sys.modules["__main__"].__dict__["_LocalSpec"]


# Without a __main__ guard, on purpose.
DRIVER = """
import os, sys
from pathlib import Path
from dovetail.contracts.executor import ExecutorNeed
from dovetail.executors.multiproc import MultiprocExecutor, MultiprocOptions
from dovetail.testing.toy_worker import Fault, ToySpec, toy_plan

faults = (Fault(1, 1, "hang", announce=Path(sys.argv[1])), Fault(0, 1, "hang")) if sys.argv[1:] else ()
executor = MultiprocExecutor(MultiprocOptions(), ToySpec(faults=faults), ExecutorNeed("cpu", tensor_parallel=2))
executor.start()
executor.execute(toy_plan(0)).result()
print(*executor.call("pid"), flush=True)
if faults:
    executor.execute(toy_plan(1)).result()
"""


def test_workers_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    script, fifo, scratch = tmp_path / "driver.py", tmp_path / "fifo", tmp_path / "tmp"
    script.write_text(DRIVER)
    scratch.mkdir()
    os.mkfifo(fifo)
    env = dict(os.environ, TMPDIR=str(scratch))
    with subprocess.Popen([sys.executable, script, fifo], stdout=subprocess.PIPE, text=True, env=env) as driver:
        assert driver.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        fifo.read_text()
        assert len(workers) == 2
        driver.kill()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert list(scratch.iterdir()) == []


def test_a_script_from_standard_input_needs_no_shutdown(tmp_path: Path) -> None:
    env = dict(os.environ, TMPDIR=str(tmp_path))
    done = subprocess.run([sys.executable], input=DRIVER, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (ExecutorNeed("cuda", tensor_parallel=2), "torch sees 1"),
        (ExecutorNeed("mps"), "not on mps"),
        (ExecutorNeed("cuda", 2, 2), "tensor_parallel=2 in each of 2 pipeline stages needs 4 GPUs, and torch sees 1"),
    ],
)
def test_refusals_say_why(need: ExecutorNeed, reason: str) -> None:
    devices = (DeviceInfo("gpu", 1 << 34, (9, 0)),)
    environment = Environment(need.device_type, num_cpus=8, memory_bytes=1 << 33, devices=devices)
    (answer,) = reasons_against(MultiprocExecutor, need, MultiprocOptions(), environment)
    assert reason in answer
    assert reasons_against(MultiprocExecutor, ExecutorNeed("cuda"), MultiprocOptions(), environment) == []


def test_a_worker_that_cannot_go_on_after_a_call_ends_all() -> None:
    """As after a capture that failed: other errors of a call leave the workers running."""
    executor = create(tensor_parallel=2)
    executor.start()
    pids = executor.call("pid")
    with pytest.raises(WorkerError, match="cannot be used any more"):
        executor.call("raise", 1, WorkerError("this process cannot be used any more", rank=1))
    with pytest.raises(WorkerError, match="cannot be used any more"):
        executor.execute(toy_plan(0))
    executor.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_graphs_are_for_gpus_and_the_null_device(tmp_path: Path) -> None:
    """Every rank gets the same."""

    def graphs(need: ExecutorNeed, **options: Any) -> set[Any]:
        executor = MultiprocExecutor(MultiprocOptions.model_validate(options), ToySpec(), need)
        runtimes = [placement.runtime for placement in executor.placements(tmp_path)]
        return {runtime and (runtime.create_device.__name__, runtime.graphs) for runtime in runtimes}

    cuda, cpu = ExecutorNeed("cuda", tensor_parallel=2), ExecutorNeed("cpu", tensor_parallel=2)
    assert graphs(cpu) == {None}
    assert graphs(cuda) == {("CudaDevice", "auto")}
    assert graphs(cuda, cuda_graphs=False) == {("CudaDevice", "off")}
    assert graphs(replace(cuda, enforce_eager=True), cuda_graphs=[2]) == {("CudaDevice", "off")}
    assert graphs(cpu, device=None, cuda_graphs=[2, 4]) == {("at_once", (2, 4))}


@pytest.mark.parametrize(
    ("need", "options", "reason"),
    [
        (ExecutorNeed("cuda"), {"device": None}, "device null runs on the CPU, and the device is cuda"),
        (ExecutorNeed("cuda", max_num_seqs=4), {"cuda_graphs": [2, 8]}, "a graph of 8 requests is never used"),
        (ExecutorNeed("cpu"), {"cuda_graphs": [2]}, "cuda_graphs [2] are for GPUs, and the device is cpu"),
    ],
)
def test_graphs_that_cannot_be_are_refused(need: ExecutorNeed, options: dict[str, Any], reason: str) -> None:
    devices = (DeviceInfo("gpu", 1 << 34, (9, 0)),)
    environment = Environment(need.device_type, num_cpus=8, memory_bytes=1 << 33, devices=devices)
    (answer,) = reasons_against(MultiprocExecutor, need, MultiprocOptions.model_validate(options), environment)
    assert reason in answer
