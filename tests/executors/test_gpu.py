"""The `gpu` executor in its null mode: the suite, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dovetail.contracts.errors import CapacityError, WorkerError
from dovetail.contracts.executor import ExecutorNeed, Placement
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.executors.gpu.cuda import CudaDevice
from dovetail.executors.gpu.executor import GPUExecutor, GPUOptions
from dovetail.testing.executor_suite import ExecutorSuite
from dovetail.testing.toy_worker import Fault, ToySpec, ToyWorker, expected_result, toy_plan

NULL = GPUOptions(device="null")
GPU = DeviceInfo("a GPU", 80 * 2**30, (9, 0))


class TestGPUExecutor(ExecutorSuite):
    plugin = GPUExecutor
    options = {"device": "null"}  # noqa: RUF012


def environment(device_type: str, *devices: DeviceInfo) -> Environment:
    return Environment(device_type, num_cpus=2, memory_bytes=2**33, devices=devices)


def test_a_step_is_not_done_when_execute_returns() -> None:
    executor = GPUExecutor(NULL, ToySpec(), ExecutorNeed("cpu"))
    executor.start()
    first, second = executor.execute(toy_plan(0)), executor.execute(toy_plan(1))
    assert not first.done()
    assert second.result() == expected_result(toy_plan(1), 1)
    assert first.result() == expected_result(toy_plan(0), 1)
    executor.shutdown()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_memory_that_runs_out_in_a_step_fails_that_step(kind: type[RuntimeError]) -> None:
    faults = (Fault(0, 1, "raise", kind("CUDA error: out of memory, 20 GiB")),)
    executor = GPUExecutor(NULL, ToySpec(faults=faults), ExecutorNeed("cpu"))
    executor.start()
    with pytest.raises(CapacityError, match=r"max_num_batched_tokens.*20 GiB"):
        executor.execute(toy_plan(1)).result()
    assert executor.execute(toy_plan(2)).result() == expected_result(toy_plan(2), 1)
    executor.shutdown()


def test_a_worker_that_cannot_go_on_after_a_call_ends_the_executor() -> None:
    """As after a capture that failed."""
    executor = GPUExecutor(NULL, ToySpec(), ExecutorNeed("cpu"))
    executor.start()
    with pytest.raises(WorkerError, match="any more"):
        executor.call("raise", 0, WorkerError("this process cannot be used any more", rank=0))
    with pytest.raises(WorkerError, match="any more"):
        executor.execute(toy_plan(0))
    executor.shutdown()


@pytest.mark.parametrize(
    "text",
    [
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        "CUDA error: unspecified launch failure",
    ],
)
def test_a_device_that_failed_under_a_library_is_lost(text: str) -> None:
    """Triton and cuBLAS raise plain RuntimeErrors."""
    executor = GPUExecutor(NULL, ToySpec(faults=(Fault(0, 1, "raise", RuntimeError(text)),)), ExecutorNeed("cpu"))
    executor.start()
    with pytest.raises(WorkerError, match="cannot use it any more"):
        executor.execute(toy_plan(1)).result()
    with pytest.raises(WorkerError, match="cannot use it any more"):
        executor.execute(toy_plan(2))
    executor.shutdown()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", CapacityError),
        ("Triton Error [CUDA]: out of memory", CapacityError),
        ("a plugin's own fault", RuntimeError),
    ],
)
def test_other_errors_of_a_step_do_not_end_the_executor(text: str, expected: type[Exception]) -> None:
    executor = GPUExecutor(NULL, ToySpec(faults=(Fault(0, 1, "raise", RuntimeError(text)),)), ExecutorNeed("cpu"))
    executor.start()
    with pytest.raises(expected):
        executor.execute(toy_plan(1)).result()
    assert executor.execute(toy_plan(2)).result() == expected_result(toy_plan(2), 1)
    executor.shutdown()


@pytest.mark.parametrize(
    ("need", "options", "devices", "reason"),
    [
        (ExecutorNeed("cpu"), {}, (), "the device is cpu"),
        (ExecutorNeed("cuda", tensor_parallel=2), {}, (GPU,), "tensor_parallel up to 1, not 2"),
        (ExecutorNeed("cuda"), {"index": 1}, (GPU,), "torch sees 1 GPUs"),
        (ExecutorNeed("cuda"), {}, (DeviceInfo("an old GPU", 2**30, (6, 1)),), "compute capability 6.1"),
        (ExecutorNeed("cuda"), {"device": None}, (GPU,), "runs on the CPU"),
    ],
)
def test_refusals_say_why(
    need: ExecutorNeed, options: dict[str, Any], devices: tuple[DeviceInfo, ...], reason: str
) -> None:
    chosen = GPUOptions.model_validate(options)
    (answer,) = reasons_against(GPUExecutor, need, chosen, environment(need.device_type, *devices))
    assert reason in answer


def test_a_gpu_that_cannot_be_used_is_refused_with_the_cause() -> None:
    machine = Environment("cpu", num_cpus=2, memory_bytes=2**33, no_devices="the driver is old")
    (answer,) = reasons_against(GPUExecutor, ExecutorNeed("cpu"), GPUOptions(), machine)
    assert answer == "gpu runs on cuda, and the device is cpu: the driver is old; or use executor cpu"


@pytest.mark.parametrize("sizes", [[0], [4, -1]])
def test_graphs_of_no_requests_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes start at 1"):
        GPUOptions.model_validate({"cuda_graphs": sizes})


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_graphs_inside_graphs_are_refused(mode: str) -> None:
    options = GPUOptions.model_validate({"compile": mode, "cuda_graphs": [1, 8]})
    (answer,) = reasons_against(GPUExecutor, ExecutorNeed("cuda"), options, environment("cuda", GPU))
    assert "max-autotune-no-cudagraphs or default, or cuda_graphs to off" in answer
    assert (
        reasons_against(GPUExecutor, ExecutorNeed("cuda", enforce_eager=True), options, environment("cuda", GPU)) == []
    )


def test_graphs_that_no_step_would_use_are_refused() -> None:
    options = GPUOptions.model_validate({"cuda_graphs": [1, 8, 64]})
    (answer,) = reasons_against(GPUExecutor, ExecutorNeed("cuda", max_num_seqs=32), options, environment("cuda", GPU))
    assert "[1, 8, 64]" in answer
    assert "leave out what is larger, or raise scheduler.max_num_seqs" in answer
    for need in (
        ExecutorNeed("cuda", max_num_seqs=64),
        ExecutorNeed("cuda"),
        ExecutorNeed("cuda", enforce_eager=True, max_num_seqs=32),
    ):
        assert reasons_against(GPUExecutor, need, options, environment("cuda", GPU)) == []


@pytest.mark.parametrize(
    ("mode", "graphs"),
    [("reduce-overhead", "off"), ("max-autotune", "off"), ("max-autotune-no-cudagraphs", "auto"), (None, "auto")],
)
def test_auto_captures_nothing_where_compile_records_graphs(mode: str | None, graphs: str) -> None:
    placements: list[Placement] = []

    class Spec(ToySpec):
        def create(self, placement: Placement) -> ToyWorker:
            placements.append(placement)
            return super().create(placement)

    options = GPUOptions.model_validate({"device": "null", "compile": mode})
    assert reasons_against(GPUExecutor, ExecutorNeed("cpu"), options, environment("cpu")) == []
    executor = GPUExecutor(options, Spec(), ExecutorNeed("cpu"))
    executor.start()
    executor.shutdown()
    assert placements[0].runtime is not None
    assert placements[0].runtime.graphs == graphs


def test_it_serves_a_gpu_and_the_null_device() -> None:
    assert reasons_against(GPUExecutor, ExecutorNeed("cuda"), GPUOptions(), environment("cuda", GPU)) == []
    assert reasons_against(GPUExecutor, ExecutorNeed("cpu"), NULL, environment("cpu")) == []


@pytest.mark.parametrize(("text", "kind"), [("out of memory", CapacityError), ("unknown error", RuntimeError)])
def test_memory_that_runs_out_while_a_graph_is_made_is_named(
    text: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own, at the end of a capture, and not of torch's allocator."""

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        yield
        raise RuntimeError(f"CUDA error: {text}")

    for name, fake in {"set_device": id, "Stream": id, "set_stream": id, "CUDAGraph": object, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    with pytest.raises(kind, match=text):
        CudaDevice("cuda").capture(lambda: None)
