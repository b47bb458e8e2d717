"""A worker without a model, for testing executors: it places no demands and fails on request.

Importable and picklable, so that it reaches workers in any process. It imports torch only if it has to use
torch.distributed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.contracts.errors import DovetailError
from dovetail.contracts.executor import Placement, WorkerReport
from dovetail.contracts.step import StepPlan, StepResult

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in a worker, at one moment."""

    rank: int | Literal["answering", "other"]
    """A rank, or the one that answers, or every one that does not."""
    at: Literal["create", "load"] | int
    """When the worker is created, when it loads, or in the step of this id, before it talks to other ranks."""
    action: Literal["raise", "exit", "hang"]
    """Raise `error`; end the process with code 3; or wait for ever."""
    error: Exception | None = None
    announce: Path | None = None
    """A FIFO to which the process writes its id before it acts; it waits for a reader."""

    def concerns(self, placement: Placement) -> bool:
        """Whether the worker is one of those that it happens to."""
        match self.rank:
            case "answering":
                return placement.answers
            case "other":
                return not placement.answers
            case rank:
                return rank == placement.rank


@dataclass(frozen=True)
class ToySpec:
    """Builds `ToyWorker`s."""

    num_threads: int | None = None
    faults: tuple[Fault, ...] = ()
    all_reduce: bool = False
    """Each step sums over all ranks with torch.distributed, as tensor parallelism does."""
    step_seconds: float = 0.0
    """How long a step takes, in which other threads run."""
    journal: Path | None = None
    """A folder where each rank writes down what is asked of it, a word a line, in a file of its number."""
    passes_on: bool = False
    """Each step sums over the ranks of one tensor rank, from stage to stage, as pipeline parallelism does. A stage that
    gets the sum of another step raises RuntimeError."""

    def create(self, placement: Placement) -> ToyWorker:
        """The worker of one rank."""
        return ToyWorker(self, placement)


class ToyWorker:
    """Answers plans with tokens that `expected_result` can tell beforehand."""

    def __init__(self, spec: ToySpec, placement: Placement):
        self._spec = spec
        self._placement = placement
        self._steps: list[int] = []
        self._pending: list[ToyStep] = []
        self._closed = False
        self._is_asleep = False
        self._inside = threading.Lock()
        self._note("create")
        self._meet("create")
        self._has_group = (spec.all_reduce or spec.passes_on) and placement.layout.num_ranks > 1
        if self._has_group:
            import torch.distributed as dist

            backend = "gloo" if placement.device == "cpu" else "nccl"
            dist.init_process_group(
                backend, placement.init_method, rank=placement.position, world_size=placement.layout.num_ranks
            )

    def load(self) -> None:
        """Loads no weights."""
        self._note("load")
        self._meet("load")

    def execute(self, plan: StepPlan) -> StepResult:
        """One token per request from the rank that answers, none from others. Raises RuntimeError where two threads are
        in the worker at once, or it sleeps."""
        with self._alone(f"step {plan.step_id}"):
            if self._is_asleep:
                raise RuntimeError("a step, while the worker sleeps")
            if self._spec.step_seconds:
                time.sleep(self._spec.step_seconds)
            self._meet(plan.step_id)
            self._steps.append(plan.step_id)
            number = self._placement.position + 1
            total = self._pass_on(plan.step_id, number) if self._spec.passes_on else self._sum_over_ranks(number)
            result = toy_result(plan, total)
            return result if self._placement.answers else StepResult(plan.step_id, [])

    def submit(self, plan: StepPlan) -> ToyStep:
        """The step is run when its result is asked for, or the next one's."""
        step = ToyStep(self, plan)
        self._pending.append(step)
        return step

    def settle_until(self, step: ToyStep) -> None:
        """Runs the steps that were submitted, up to this one."""
        while step in self._pending:
            self._pending.pop(0).settle()

    def call(self, method: str, *args: Any) -> Any:
        """The operations of a worker, and more that show where and how it runs."""
        with self._alone(method):
            return self._answer(method, *args)

    def _answer(self, method: str, *args: Any) -> Any:
        match method, args:
            case "describe", ():
                return WorkerReport(placement=self._placement, caches=(), available_bytes=1 << 20)
            case "initialize_cache", (_, int(), int()):
                return None
            case "plugin_hash", ():
                return "toy"
            case "sleep", (int(level),):
                self._note("sleep")
                self._is_asleep = True
                return 1000 * level + self._placement.rank
            case "wake_up", ():
                self._note("wake_up")
                self._is_asleep = False
                return None
            case "ping", ():
                return self._placement.rank
            case "placement", ():
                return self._placement
            case "steps", ():
                return self._steps
            case "pid", ():
                return os.getpid()
            case "path", ():
                return sys.path
            case "torch_threads", ():
                import torch

                return torch.get_num_threads()
            case "cores", ():
                return os.sched_getaffinity(0)
            case "unpicklable", ():
                return threading.Lock()
            case "raise", (int(rank), Exception() as error):
                if rank == self._placement.rank:
                    raise error
                return None
        raise ValueError(f"a toy worker knows no operation {method!r} with {len(args)} arguments")

    def close(self) -> None:
        """Leaves the process group."""
        if self._closed:
            return
        self._closed = True
        self._note("close")
        if self._has_group:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._inside.acquire(blocking=False):
            raise RuntimeError(f"{what}, while another operation is under way")
        try:
            yield
        finally:
            self._inside.release()

    def _note(self, word: str) -> None:
        if self._spec.journal is not None:
            with (self._spec.journal / str(self._placement.rank)).open("a") as file:
                file.write(f"{word}\n")

    def _sum_over_ranks(self, number: int) -> int:
        num_ranks = self._placement.layout.num_ranks
        if not self._spec.all_reduce or num_ranks == 1:
            return num_ranks * (num_ranks + 1) // 2
        import torch
        import torch.distributed as dist

        tensor: torch.Tensor = torch.tensor([number], device=self._placement.device)
        dist.all_reduce(tensor)
        return int(tensor.item())

    def _pass_on(self, step_id: int, number: int) -> int:
        import torch
        import torch.distributed as dist

        placement = self._placement
        message: torch.Tensor = torch.tensor([step_id, 0], device=placement.device)
        if placement.stage > 0:
            dist.recv(message, src=placement.position - placement.tensor_parallel)
        received, before = message.tolist()
        if received != step_id:
            raise RuntimeError(f"step {step_id} on stage {placement.stage}, and the stage before it runs {received}")
        if placement.stage < placement.num_stages - 1:
            message[1] += number
            dist.send(message, dst=placement.position + placement.tensor_parallel)
        return int(before) + number

    def _meet(self, moment: str | int) -> None:
        for fault in self._spec.faults:
            if fault.at == moment and fault.concerns(self._placement):
                _act(fault)


class ToyStep:
    """A `PendingStep` of a toy worker."""

    def __init__(self, worker: ToyWorker, plan: StepPlan):
        self._worker = worker
        self._plan = plan
        self._settled: StepResult | Exception | None = None

    def settle(self) -> None:
        """Runs the step."""
        try:
            self._settled = self._worker.execute(self._plan)
        except Exception as error:
            self._settled = error

    def result(self) -> StepResult:
        """Runs it and those before it, if that was not done."""
        self._worker.settle_until(self)
        if isinstance(self._settled, Exception):
            raise self._settled
        assert self._settled is not None
        return self._settled


def _act(fault: Fault) -> None:
    if fault.announce is not None:
        fault.announce.write_text(str(os.getpid()))
    match fault.action:
        case "exit":
            os._exit(3)
        case "hang":
            threading.Event().wait()
        case "raise":
            raise fault.error or DovetailError(f"a fault was asked for at {fault.at!r}")


def toy_plan(step_id: int, num_requests: int = 3) -> StepPlan:
    """A decode step of some requests."""
    return StepPlan(step_id=step_id, seq_ids=list(range(num_requests)), num_tokens=[1] * num_requests)


def toy_result(plan: StepPlan, sum_over_ranks: int) -> StepResult:
    """The result of a plan: each token says which request and step it is of, and that all ranks took part."""
    tokens = [(31 * seq_id + 7 * plan.step_id + 1009 * sum_over_ranks) % 32000 for seq_id in plan.seq_ids]
    return StepResult(step_id=plan.step_id, token_ids=tokens)


def expected_result(plan: StepPlan, num_ranks: int) -> StepResult:
    """What any executor must return for a plan, over `num_ranks` toy workers."""
    return toy_result(plan, sum(position + 1 for position in range(num_ranks)))
