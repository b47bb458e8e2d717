"""The conformance suite of executors. A third party's test is a subclass::

    from dovetail.testing import ProcessExecutorSuite

    class TestMyExecutor(ProcessExecutorSuite):
        plugin = MyExecutor

`ExecutorSuite` holds for every executor, `ProcessExecutorSuite` adds what must hold where workers are processes of
their own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from dovetail.contracts.errors import CapacityError, DovetailError, ModelError, PluginError, WorkerError
from dovetail.contracts.executor import Executor, ExecutorNeed, Placement, WorkerReport
from dovetail.contracts.needs import reasons_against
from dovetail.testing.suite import PluginSuite
from dovetail.testing.toy_worker import Fault, ToySpec, expected_result, toy_plan
from dovetail.worker.machine.environment import detect_environment


class ExecutorSuite(PluginSuite):
    """Tests of every executor."""

    kind: ClassVar[str] = "executor"
    plugin: ClassVar[type[Executor]]
    options: ClassVar[Mapping[str, Any]] = {}
    device_type: ClassVar[str] = "cpu"
    tensor_parallel: ClassVar[int] = 1
    pipeline_parallel: ClassVar[int] = 1

    @property
    def num_ranks(self) -> int:
        """Number of workers that the need asks for."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def need(self) -> ExecutorNeed:
        """The need that a config makes."""
        return ExecutorNeed(
            self.device_type, tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel
        )

    def with_two_stages(self) -> ExecutorSuite:
        """This suite, for two pipeline stages of one rank. Skips the test where the executor runs none."""
        most = self.plugin.capabilities.pipeline_parallel
        if most is not None and most < 2:
            pytest.skip("it runs no pipeline stages")
        staged: ExecutorSuite = type("Staged", (type(self),), {"tensor_parallel": 1, "pipeline_parallel": 2})()
        return staged

    def create(self, spec: ToySpec | None = None) -> Executor:
        """An executor over toy workers, not started."""
        options = self.plugin.Options.model_validate(dict(self.options))
        return self.plugin(options, spec or ToySpec(), self.need)

    @contextmanager
    def started(self, spec: ToySpec | None = None) -> Iterator[Executor]:
        """An executor that runs, and is shut down in any case."""
        executor = self.create(spec)
        try:
            executor.start()
            yield executor
        finally:
            executor.shutdown()

    @pytest.fixture(autouse=True)
    def nothing_left(self) -> Iterator[None]:
        """No test may leave a process, a thread, a file descriptor or shared memory behind."""
        before = self.resources()
        yield
        gc.collect()
        deadline = time.monotonic() + 10
        while left := {name: now - before[name] for name, now in self.resources().items() if now - before[name]}:
            # Shared memory may belong to another process that has not mapped it yet.
            is_ours = set(left) != {"shared memory"} or time.monotonic() > deadline
            assert not is_ours, f"left behind: {left}"
            time.sleep(0.1)

    def resources(self) -> dict[str, set[Any]]:
        """What exists now and must exist no longer when an executor was shut down. Override it for executors that
        share a runtime of their own with others, such as a cluster."""
        process = psutil.Process()
        return {
            "processes": {child.pid for child in process.children(recursive=True)},
            "threads": {thread.name for thread in threading.enumerate()},
            "descriptors": set(range(process.num_fds())),
            "shared memory": _unowned_shared_memory(),
        }

    def test_declares_its_contract(self) -> None:
        """The host can tell which contract the class was written for, and how many plans to hand over."""
        super().test_declares_its_contract()
        assert self.plugin.max_in_flight >= 1

    def test_declares_what_it_runs(self) -> None:
        """A config that asks for what the suite runs is not refused, and neither is one that runs eagerly."""
        options = self.plugin.Options.model_validate(dict(self.options))
        environment = detect_environment(self.device_type)
        for need in (self.need, replace(self.need, enforce_eager=True)):
            assert reasons_against(self.plugin, need, options, environment) == []

    def test_results_come_in_the_order_of_plans(self) -> None:
        """A hundred plans handed over without waiting, each of which leaves others the time to overtake it."""
        plans = [toy_plan(step_id) for step_id in range(100)]
        with self.started(ToySpec(step_seconds=0.0002)) as executor:
            results = [future.result() for future in [executor.execute(plan) for plan in plans]]
            assert results == [expected_result(plan, self.num_ranks) for plan in plans]
            # Every rank has run every plan, in order.
            assert executor.call("steps") == [list(range(100))] * self.num_ranks

    def test_there_is_a_worker_for_every_rank(self) -> None:
        """There are as many workers as the need asks for, and each answers for itself."""
        with self.started() as executor:
            assert executor.call("ping") == list(range(self.num_ranks))

    def test_workers_share_the_model_without_gaps(self) -> None:
        """All know one layout, in which each has another share of another stage; one of them answers."""
        with self.started() as executor:
            placements: list[Placement] = executor.call("placement")
        assert len({placement.layout for placement in placements}) == 1, "workers got different layouts"
        layout = placements[0].layout
        assert (layout.tensor_parallel, layout.num_stages) == (self.tensor_parallel, self.pipeline_parallel)
        shares = {(placement.stage, placement.tensor_rank) for placement in placements}
        assert shares == set(itertools.product(range(self.pipeline_parallel), range(self.tensor_parallel)))
        assert [placement.rank for placement in placements if placement.answers] == [layout.answering_rank]
        meeting_points = {placement.init_method for placement in placements}
        assert len(meeting_points) == 1
        assert self.num_ranks == 1 or meeting_points != {None}, "ranks cannot find each other without init_method"

    def test_workers_are_where_they_were_expected(self) -> None:
        """What `expected_workers` says before anything is started, as far as it says it."""
        options = self.plugin.Options.model_validate(dict(self.options))
        expected = self.plugin.expected_workers(self.need, options)
        with self.started() as executor:
            placements: list[Placement] = executor.call("placement")
        layout = placements[0].layout
        assert expected.layout.tensor_parallel == layout.tensor_parallel, "layouts differ in tensor_parallel"
        assert expected.layout.num_stages == layout.num_stages, "layouts differ in num_stages"
        if expected.devices:
            assert list(expected.devices) == [placement.device for placement in placements]
        if expected.nodes:
            assert expected.layout.nodes == layout.nodes, "ranks are on other machines"

    def test_the_status_has_each_rank_in_order(self) -> None:
        """Or none at all; also once the executor was shut down."""
        with self.started() as executor:
            placements: list[Placement] = executor.call("placement")
            executor.execute(toy_plan(0)).result()
            status = executor.rank_status()
        if status:
            shown = [(one.rank, one.stage, one.tensor_rank) for one in status]
            assert shown == [(place.rank, place.stage, place.tensor_rank) for place in placements]
            assert all(one.is_alive for one in status), "a worker that runs is shown as ended"
        assert len(executor.rank_status()) in (0, self.num_ranks)

    def test_a_result_is_that_of_the_rank_that_answers(self) -> None:
        """Other ranks may leave parts of theirs out."""
        plan = toy_plan(0)
        with self.started() as executor:
            assert executor.execute(plan).result() == expected_result(plan, self.num_ranks)

    def test_calls_answer_in_rank_order(self) -> None:
        """Each rank is on its device, and gets the arguments."""
        with self.started() as executor:
            placements: list[Placement] = executor.call("placement")
            assert [placement.rank for placement in placements] == list(range(self.num_ranks))
            assert all(placement.device.startswith(self.device_type) for placement in placements)
            assert all(isinstance(report, WorkerReport) for report in executor.call("describe"))
            assert executor.call("initialize_cache", (), 8, 0) == [None] * self.num_ranks

    def test_a_call_meets_no_step(self) -> None:
        """A worker is never entered by two threads: a call behind plans that are not done waits for those that have
        begun."""
        with self.started(ToySpec(step_seconds=0.005)) as executor:
            futures = [executor.execute(toy_plan(step_id)) for step_id in range(5)]
            for step_id, future in enumerate(futures):
                assert future.result() == expected_result(toy_plan(step_id), self.num_ranks)
                # Where steps run by themselves, the next has begun.
                assert executor.call("ping") == list(range(self.num_ranks))

    def test_a_worker_is_created_loaded_and_closed_once(self, tmp_path: Path) -> None:
        """In this order, on every rank; and it is the worker that sleeps and wakes up between steps."""
        with self.started(ToySpec(journal=tmp_path)) as executor:
            executor.execute(toy_plan(0)).result()
            assert executor.call("sleep", 2) == [2000 + rank for rank in range(self.num_ranks)]
            assert executor.call("wake_up") == [None] * self.num_ranks
            assert executor.execute(toy_plan(1)).result() == expected_result(toy_plan(1), self.num_ranks)
        journals = [(tmp_path / str(rank)).read_text().split() for rank in range(self.num_ranks)]
        assert journals == [["create", "load", "sleep", "wake_up", "close"]] * self.num_ranks

    def test_workers_have_the_threads_that_the_spec_names(self) -> None:
        """Here more than one, for machines where OMP_NUM_THREADS or a single core makes it one anyway; where ranks
        reduce together, one."""
        num_threads = min(2, psutil.cpu_count(logical=False) or 1)
        with self.started(ToySpec(num_threads=num_threads)) as executor:
            executor.execute(toy_plan(0)).result()
            assert executor.call("torch_threads") == [num_threads] * self.num_ranks

    def test_ranks_reduce_together(self) -> None:
        """A collective per step, over the process group that `Placement` describes."""
        with self.started(ToySpec(all_reduce=True, num_threads=1)) as executor:
            for step_id in range(3):
                plan = toy_plan(step_id)
                assert executor.execute(plan).result() == expected_result(plan, self.num_ranks)
            assert executor.call("torch_threads") == [1] * self.num_ranks

    def test_stages_pass_on_what_they_computed(self) -> None:
        """Of two pipeline stages, over the process group of both, while one plan more than there are stages is in
        flight. Each stage runs the plans in the same order; the last one answers."""
        with self.with_two_stages().started(ToySpec(passes_on=True, num_threads=1)) as executor:
            placements: list[Placement] = executor.call("placement")
            assert sorted(placement.stage for placement in placements) == [0, 1]
            assert [placement.answers for placement in placements] == [placement.stage == 1 for placement in placements]
            futures = [executor.execute(toy_plan(step_id)) for step_id in range(3)]
            for step_id, future in enumerate(futures):
                assert future.result() == expected_result(toy_plan(step_id), 2)

    @pytest.mark.parametrize("at", ["create", "load"])
    def test_start_raises_what_the_last_rank_raised(self, at: Any) -> None:
        """The error has its type and message."""
        fault = Fault(self.num_ranks - 1, at, "raise", ModelError("no weights here"))
        executor = self.create(ToySpec(faults=(fault,)))
        with pytest.raises(ModelError, match="no weights here"):
            executor.start()
        executor.shutdown()

    def test_an_error_in_a_step_reaches_the_caller(self) -> None:
        """Either as it is, and the executor goes on; or as a `WorkerError` that quotes it, and the executor is dead."""
        fault = Fault("answering", 1, "raise", CapacityError("out of pages"))
        with self.started(ToySpec(faults=(fault,))) as executor:
            answering = _answering_rank(executor)
            executor.execute(toy_plan(0)).result()
            error = executor.execute(toy_plan(1)).exception()
            assert isinstance(error, DovetailError)
            assert "out of pages" in str(error)
            if isinstance(error, WorkerError):
                assert error.rank == answering
                assert isinstance(error.__cause__, CapacityError)
                with pytest.raises(WorkerError, match="out of pages"):
                    executor.execute(toy_plan(2))
                with pytest.raises(WorkerError, match="out of pages"):
                    executor.call("ping")
            else:
                assert isinstance(error, CapacityError)
                assert executor.execute(toy_plan(2)).result() == expected_result(toy_plan(2), self.num_ranks)

    def test_an_error_in_a_call_is_raised_as_it_is(self) -> None:
        """The workers go on after the error."""
        with self.started() as executor:
            with pytest.raises(CapacityError, match="too many blocks"):
                executor.call("raise", self.num_ranks - 1, CapacityError("too many blocks"))
            with pytest.raises(ValueError, match="no_such_operation"):
                executor.call("no_such_operation")
            assert executor.call("ping") == list(range(self.num_ranks))

    def test_shutdown_is_idempotent_and_final(self) -> None:
        """It also ends an executor that never started."""
        self.create().shutdown()
        executor = self.create()
        executor.start()
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(WorkerError):
            executor.execute(toy_plan(0))
        with pytest.raises(WorkerError):
            executor.call("ping")

    def test_another_executor_may_follow_or_stand_beside(self) -> None:
        """A second executor works in the same process."""
        plan = toy_plan(0)
        with self.started() as first:
            assert first.execute(plan).result() == expected_result(plan, self.num_ranks)
            with self.started() as second:
                assert second.execute(plan).result() == expected_result(plan, self.num_ranks)
        with self.started() as third:
            assert third.execute(plan).result() == expected_result(plan, self.num_ranks)


class ProcessExecutorSuite(ExecutorSuite):
    """Further tests of executors whose workers are processes on this machine, each of which can die alone."""

    tensor_parallel: ClassVar[int] = 2

    @pytest.fixture
    def fifo(self, tmp_path: Path) -> Path:
        """Where a faulty worker says that it has reached its fault."""
        path = tmp_path / "fifo"
        os.mkfifo(path)
        return path

    def test_a_killed_rank_is_named(self, fifo: Path) -> None:
        """SIGKILL in mid-step, while the other ranks wait for the victim in a collective. `rank_status`, which waits
        for no step, knows who is alive. A new executor works."""
        victim = self.num_ranks - 1
        fault = Fault(victim, 1, "hang", announce=fifo)
        with self.started(ToySpec(faults=(fault,), all_reduce=True, num_threads=1)) as executor:
            pids = executor.call("pid")
            processes = [psutil.Process(pid) for pid in pids]
            executor.execute(toy_plan(0)).result()
            futures = [executor.execute(toy_plan(step_id)) for step_id in (1, 2)]
            assert int(fifo.read_text()) == pids[victim]
            with ThreadPoolExecutor(1) as watcher:
                status = watcher.submit(executor.rank_status)
                try:
                    assert all(one.is_alive for one in status.result(timeout=10)), "a rank that hangs is alive"
                finally:
                    os.kill(pids[victim], signal.SIGKILL)
            for future in futures:
                error = future.exception(timeout=10)
                assert isinstance(error, WorkerError)
                assert error.rank == victim
                assert f"rank {victim}" in str(error)
                assert "SIGKILL" in str(error)
            _, alive = psutil.wait_procs(processes, timeout=10)
            assert not alive
            assert not any(one.is_alive for one in executor.rank_status() if one.rank == victim)
            with pytest.raises(WorkerError, match="SIGKILL"):
                executor.call("ping")
        with self.started() as anew:
            assert anew.execute(toy_plan(0)).result() == expected_result(toy_plan(0), self.num_ranks)

    def test_a_stage_that_is_killed_is_named(self, fifo: Path) -> None:
        """And not the one behind it, which waits for its states."""
        fault = Fault("other", 1, "hang", announce=fifo)
        spec = ToySpec(faults=(fault,), passes_on=True, num_threads=1)
        with self.with_two_stages().started(spec) as executor:
            victim = 1 - _answering_rank(executor)
            executor.execute(toy_plan(0)).result()
            futures = [executor.execute(toy_plan(step_id)) for step_id in (1, 2, 3)]
            os.kill(int(fifo.read_text()), signal.SIGKILL)
            for future in futures:
                error = future.exception(timeout=60)
                assert isinstance(error, WorkerError)
                assert error.rank == victim
                assert "SIGKILL" in str(error)

    def test_a_rank_that_exits_is_named(self) -> None:
        """The error names the rank that exits while another hangs."""
        hang, leave = Fault(0, 0, "hang"), Fault(self.num_ranks - 1, 0, "exit")
        with self.started(ToySpec(faults=(hang, leave))) as executor:
            error = executor.execute(toy_plan(0)).exception(timeout=10)
            assert isinstance(error, WorkerError)
            assert error.rank == self.num_ranks - 1
            assert "exited with code 3" in str(error)

    def test_a_rank_that_dies_between_steps_is_noticed(self) -> None:
        """One of the next steps notices the death."""
        with self.started() as executor:
            victim = self.num_ranks - 1
            process = psutil.Process(executor.call("pid")[victim])
            process.kill()
            process.wait(timeout=10)
            with pytest.raises(WorkerError, match=f"rank {victim}"):
                _run_steps(executor)

    def test_an_error_of_another_rank_ends_the_step(self) -> None:
        """Although the answering rank has not replied."""
        fault = Fault("other", 0, "raise", CapacityError("out of pages"))
        with self.started(ToySpec(faults=(fault, Fault("answering", 0, "hang")))) as executor:
            answering = _answering_rank(executor)
            error = executor.execute(toy_plan(0)).exception(timeout=10)
            assert isinstance(error, WorkerError)
            assert error.rank != answering
            assert isinstance(error.__cause__, CapacityError)

    def test_a_death_at_start_is_an_error(self) -> None:
        """`start` does not wait for a worker that has died."""
        fault = Fault(self.num_ranks - 1, "load", "exit")
        with pytest.raises(WorkerError, match="exited with code 3") as caught, self.started(ToySpec(faults=(fault,))):
            pass
        assert caught.value.rank == self.num_ranks - 1

    def test_a_plugin_that_a_worker_lacks_is_reported_with_its_place(self) -> None:
        """The error says which rank lacks it, on which host."""
        fault = Fault(self.num_ranks - 1, "create", "raise", PluginError("no plugin 'x'"))
        where = rf"rank {self.num_ranks - 1} on host .+: no plugin 'x'"
        with pytest.raises(PluginError, match=where), self.started(ToySpec(faults=(fault,))):
            pass

    def test_workers_have_the_import_path_of_the_driver(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Workers find the same plugins as the driver."""
        monkeypatch.syspath_prepend(str(tmp_path))
        with self.started() as executor:
            assert all(path[0] == str(tmp_path) for path in executor.call("path"))

    def test_shutdown_ends_workers_that_hang(self, fifo: Path) -> None:
        """Pending steps then fail."""
        executor = self.create(ToySpec(faults=(Fault("answering", 0, "hang", announce=fifo),)))
        executor.start()
        future = executor.execute(toy_plan(0))
        fifo.read_text()
        executor.shutdown()
        assert isinstance(future.exception(timeout=10), WorkerError)


def _unowned_shared_memory() -> set[str]:
    """POSIX shared memory that no other living process maps: this process's own, or an orphan."""
    folder = Path("/dev/shm")
    names = _inodes(folder)
    if not names:
        return set()
    mapped: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            maps = Path(f"/proc/{process.pid}/maps").read_text() if process.pid != os.getpid() else ""
            # By inode: the process that creates a semaphore maps it under another name than the one it then gets.
            mapped |= {line.split()[4] for line in maps.splitlines() if f"{folder}/" in line}
    # What went while the processes were read was its owner's to remove.
    return {name for name, inode in _inodes(folder).items() if names.get(name) == inode and inode not in mapped}


def _inodes(folder: Path) -> dict[str, str]:
    """The inode of every file of a folder, by name."""
    return {entry.name: str(entry.inode()) for entry in os.scandir(folder)} if folder.is_dir() else {}


def _answering_rank(executor: Executor) -> int:
    """As the workers have it."""
    (placement,) = [placement for placement in executor.call("placement") if placement.answers]
    return int(placement.rank)


def _run_steps(executor: Executor) -> None:
    for step_id in itertools.count():
        executor.execute(toy_plan(step_id)).result(timeout=10)
