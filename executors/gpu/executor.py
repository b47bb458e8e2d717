"""The `gpu` executor: one worker in this process, two steps in flight."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from dovetail.contracts.device import Runtime
from dovetail.contracts.errors import CapacityError, WorkerError
from dovetail.contracts.executor import (
    Executor,
    ExecutorCapabilities,
    ExecutorNeed,
    ExpectedWorkers,
    PendingStep,
    Placement,
    RankStatus,
    Worker,
    WorkerLayout,
    WorkerSpec,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.executors._graphs import GraphSizes, Sizes, against_sizes, wanted_sizes
from dovetail.executors._own_status import own_status
from dovetail.executors._threads import TorchThreads

_MIN_CAPABILITY = (7, 0)
_MODES_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record graphs themselves, which cannot be captured into another graph."""
_LOST = ("CUDA error:", "CUDA driver error:", "Triton Error [CUDA]:", "CUBLAS_STATUS_")
"""Texts in plain RuntimeErrors of Triton and torch's libraries when the device fails."""


class GPUOptions(PluginOptions):
    """Options of `gpu`."""

    device: Literal["cuda", "null"] = "cuda"
    """"null": no GPU; the same host path on the CPU, for tests and for measuring host time."""
    index: int = Field(default=0, ge=0)
    """Index of the GPU."""
    cuda_graphs: GraphSizes = "auto"
    """Batch sizes for which decode and verify steps are captured; "off", or executor.enforce_eager: none. "auto": a
    ladder of sizes, or none where `compile` records graphs of its own."""
    compile: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Mode of torch.compile for the model's forward pass; null: not compiled."""
    null_order: Literal["at once", "late", "early"] = "at once"
    """When the null device does its work: "late" and "early" make missing synchronisation visible."""

    @field_validator("device", mode="before")
    @classmethod
    def _null_is_a_name(cls, value: Any) -> Any:
        return "null" if value is None else value  # what YAML makes of null


class StepFuture(Future[StepResult]):
    """A future that waits for the device in the thread that asks for its result, so no further thread waits."""

    def __init__(self, pending: PendingStep, note: Callable[[Exception], Exception]):
        super().__init__()
        self._pending = pending
        self._note = note

    def result(self, timeout: float | None = None) -> StepResult:
        """Waits for the device, without a timeout."""
        self._settle()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._settle()
        return super().exception(timeout)

    def _settle(self) -> None:
        if self.done():
            return
        try:
            self.set_result(self._pending.result())
        except Exception as error:
            self.set_exception(self._note(error))


class GPUExecutor(Executor):
    """Hands steps to one worker in the calling thread. While the device computes a step, the engine schedules the next.

    An error of a step is raised by its future, unchanged, and the executor goes on. A fault of the device itself, after
    which CUDA does not work in this process, is a `WorkerError`.
    """

    contract: ClassVar[tuple[int, int]] = (1, 8)
    Options: ClassVar[type[PluginOptions]] = GPUOptions
    preference: ClassVar[int] = 9
    capabilities = ExecutorCapabilities(device_types=frozenset({"cpu", "cuda"}), enforce_eager=True)
    max_in_flight: ClassVar[int] = 2
    options: GPUOptions

    def __init__(self, options: GPUOptions, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, need)
        self._worker: Worker | None = None
        self._failure: WorkerError | None = None
        self._torch_threads = TorchThreads()

    @classmethod
    def check(cls, need: ExecutorNeed, options: GPUOptions, environment: Environment) -> list[str]:
        """Refuses a GPU that torch cannot use; with `device` null none is needed."""
        reasons = _against_sizes(need, options)
        if options.device == "null":
            if need.device_type != "cpu":
                reasons.append(f"executor.device null runs on the CPU, and the device is {need.device_type}")
            return reasons
        if need.device_type != "cuda":
            why = environment.no_devices or "set device to cuda"
            return [*reasons, f"gpu runs on cuda, and the device is {need.device_type}: {why}; or use executor cpu"]
        if options.index >= len(environment.devices):
            return [*reasons, f"executor.index {options.index}: torch sees {len(environment.devices)} GPUs"]
        device = environment.devices[options.index]
        if device.compute_capability < _MIN_CAPABILITY:
            found = ".".join(map(str, device.compute_capability))
            reasons.append(f"{device.name} has compute capability {found}; gpu needs 7.0 or newer")
        return reasons

    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: GPUOptions) -> ExpectedWorkers:
        """One worker, in the engine's process."""
        device = "cpu" if options.device == "null" else f"cuda:{options.index}"
        return ExpectedWorkers(layout=WorkerLayout(), devices=(device,), nodes=("this machine",), transport="")

    def start(self) -> None:
        """Builds and loads the worker in this process."""
        if self._worker is not None:
            raise RuntimeError("start() was called twice")
        if self.spec.num_threads is not None:  # for what the host computes
            self._torch_threads.set(self.spec.num_threads)
        try:
            self._worker = self.spec.create(self._placement())
            self._worker.load()
        except BaseException:
            self.shutdown()
            raise

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Hands the step over; the future waits for it. The future is done already where the worker had to wait for the
        step, or could not hand it over and failed."""
        worker = self._running()
        try:
            pending = worker.submit(plan)
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(self._noted(error))
            return failed
        if not isinstance(pending, StepResult):
            return StepFuture(pending, self._noted)
        known: Future[StepResult] = Future()
        known.set_result(pending)
        return known

    def call(self, method: str, *args: Any) -> list[Any]:
        """Returns the worker's answer. A `WorkerError` of the worker ends the executor."""
        worker = self._running()
        try:
            return [worker.call(method, *args)]
        except WorkerError as error:
            self._failure = error
            raise

    def rank_status(self) -> tuple[RankStatus, ...]:
        """The engine's own process."""
        return () if self._worker is None else (own_status(self._placement().device),)

    def shutdown(self) -> None:
        """Closes the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._torch_threads.restore()

    def _placement(self) -> Placement:
        options = self.options
        graphs = _graphs(self.need, options)
        if options.device == "null":
            from dovetail.executors.gpu import host

            orders = {"at once": host.at_once, "late": host.late, "early": host.early}
            runtime = Runtime(orders[options.null_order], graphs, options.compile)
            return Placement(device="cpu", runtime=runtime)
        from dovetail.executors.gpu.cuda import CudaDevice

        return Placement(device=f"cuda:{options.index}", runtime=Runtime(CudaDevice, graphs, options.compile))

    def _running(self) -> Worker:
        if self._failure is not None:
            raise self._failure
        if self._worker is None:
            raise WorkerError("this executor is not running: it was not started, or was shut down", rank=0)
        return self._worker

    def _noted(self, error: Exception) -> Exception:
        error = _translated(error)
        if isinstance(error, WorkerError):
            self._failure = error
        return error


def _graphs(need: ExecutorNeed, options: GPUOptions) -> Sizes:
    """The sizes to capture: `executor.cuda_graphs`, unless other settings turn capture off."""
    if options.cuda_graphs == "auto" and options.compile in _MODES_WITH_GRAPHS:
        return "off"
    return wanted_sizes(need, options.cuda_graphs)


def _against_sizes(need: ExecutorNeed, options: GPUOptions) -> list[str]:
    """Returns the reasons against explicit batch sizes of `executor.cuda_graphs`."""
    sizes, reasons = _graphs(need, options), []
    if isinstance(sizes, tuple) and options.compile in _MODES_WITH_GRAPHS:
        reasons.append(
            f"executor.compile {options.compile} records graphs of its own, which executor.cuda_graphs {list(sizes)} "
            "cannot capture: set compile to max-autotune-no-cudagraphs or default, or cuda_graphs to off"
        )
    return reasons + against_sizes(need, sizes)


def _translated(error: Exception) -> Exception:
    """Translates an error for the engine: out of memory, which fails one step; or the device is lost."""
    import torch

    from dovetail.executors.gpu.out_of_memory import is_out_of_memory

    text = str(error) if isinstance(error, RuntimeError) else ""
    if is_out_of_memory(error):
        translated = CapacityError(
            f"the device ran out of memory in this step: lower cache.memory_fraction or "
            f"scheduler.max_num_batched_tokens ({error})"
        )
        translated.__cause__ = error
        return translated
    if isinstance(error, torch.AcceleratorError) or any(part in text for part in _LOST):
        lost = WorkerError(f"the device failed, and this process cannot use it any more: {error}", rank=0)
        lost.__cause__ = error
        return lost
    return error
