"""Executor: where workers run, how steps and calls reach them, what happens when one dies.

An executor gets a `WorkerSpec` that can build a worker in any process (it pickles). It starts one worker per rank and
passes plans to all of them. It does not know models or tokens. Life of an executor::

    executor = Executor(options, spec, need)
    executor.start()                        workers exist and hold their weights
    executor.call("describe")               WorkerReport per rank, in rank order
    executor.call("initialize_cache", layout, num_blocks, num_host_blocks)
    executor.execute(plan).result()         once per step, in order; see `Executor.max_in_flight`
    executor.call("sleep", level), call("wake_up")      between steps; see `Worker.call`
    executor.shutdown()                     idempotent; leaves no process and no shared memory

After a `WorkerError` an executor is dead: every later call raises it again, and only `shutdown` is allowed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

from dovetail.contracts.device import Runtime
from dovetail.contracts.kv import KVLayout, LayerCache
from dovetail.contracts.needs import RUNS_ON, among, at_most, compared, flag, informs
from dovetail.contracts.plugin import Environment, Plugin, PluginOptions
from dovetail.contracts.step import StepPlan, StepResult


@dataclass(frozen=True, kw_only=True)
class ExecutorCapabilities:
    """What an executor can do."""

    device_types: frozenset[str] | None = frozenset()
    """Devices that the workers run on, as torch names them; None: any."""
    tensor_parallel: int | None = 1
    """Most ranks that can share each layer; None: any number."""
    pipeline_parallel: int | None = 1
    """Most groups of ranks that can share the layers; None: any number."""
    enforce_eager: bool = False
    """The executor captures no graphs where `ExecutorNeed.enforce_eager` is set, or never captures any."""


_MORE = "{name} runs %s up to {has}, not {asked}: lower executor.%s, or choose an executor with more workers."


@dataclass(frozen=True)
class ExecutorNeed:
    """What the config asks of an executor; the argument of `check`."""

    device_type: str = field(metadata=compared("device_types", among, RUNS_ON))
    tensor_parallel: int = field(
        default=1, metadata=compared("tensor_parallel", at_most, _MORE % ("tensor_parallel", "tensor_parallel"))
    )
    pipeline_parallel: int = field(
        default=1, metadata=compared("pipeline_parallel", at_most, _MORE % ("pipeline_parallel", "pipeline_parallel"))
    )
    enforce_eager: bool = field(
        default=False,
        metadata=compared(
            "enforce_eager",
            flag,
            "{name} does not say that it can do without captured graphs: remove "
            "executor.enforce_eager, or choose another executor.",
        ),
    )
    """Steps are issued operation by operation: no graph is captured."""
    max_num_seqs: int | None = field(
        default=None, metadata=informs("an executor passes on steps of any size; `check` may judge its options by it")
    )
    """Most requests in one step; None: not known."""
    num_replicas: int = field(
        default=1,
        metadata=informs("replicas do not meet unless options have them share something, which `check` knows"),
    )
    """Engines of this config that one server runs. Each has an executor of its own with the same options."""

    @property
    def num_ranks(self) -> int:
        """Workers, over all pipeline stages."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class ThreadCount:
    """CPU threads of each worker."""

    count: int
    reason: str
    """Where the number comes from, as messages name it: "OMP_NUM_THREADS"."""


ANSWERING_TENSOR_RANK: Final = 0
"""The tensor rank of the last stage that answers."""


@dataclass(frozen=True, kw_only=True)
class WorkerLayout:
    """How one model is spread over workers: pipeline stages (groups of consecutive layers), each split over
    `tensor_parallel` workers.

    A worker has two numbers. Its *rank* is its index in what `Executor.call` returns, and errors name it. Its
    *position* is what it computes, and its rank in torch.distributed: stage * tensor_parallel + tensor rank. The
    executor chooses which rank has which position (a cluster may number workers by node), so ask this record what a
    rank computes. Raises `ValueError` where its fields do not fit together.
    """

    tensor_parallel: int = 1
    """Workers that share each layer."""
    num_stages: int = 1
    positions: tuple[int, ...] = ()
    """Position of each rank; empty: equal to the rank."""
    nodes: tuple[int, ...] = ()
    """Machine of each rank, numbered from 0 in any order; empty: all are on one."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.num_stages < 1:
            raise ValueError(f"a layout of {self.num_stages} stages of {self.tensor_parallel} workers has no worker")
        if self.positions and sorted(self.positions) != list(range(self.num_ranks)):
            raise ValueError(f"positions {self.positions} do not name each of {self.num_ranks} positions once")
        if self.nodes and len(self.nodes) != self.num_ranks:
            raise ValueError(f"nodes names the machines of {len(self.nodes)} ranks, and there are {self.num_ranks}")

    @property
    def num_ranks(self) -> int:
        """Number of workers, over all stages."""
        return self.tensor_parallel * self.num_stages

    @property
    def answering_rank(self) -> int:
        """The rank that samples, drafts and answers: it has tensor rank `ANSWERING_TENSOR_RANK` of the last stage."""
        return self.ranks_of_stage(self.num_stages - 1)[ANSWERING_TENSOR_RANK]

    def position(self, rank: int) -> int:
        """Returns the position of `rank`: stage * tensor_parallel + tensor rank."""
        return self.positions[rank] if self.positions else rank

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Returns the ranks that share the layers of `stage`, in order of their tensor ranks."""
        by_position = sorted(range(self.num_ranks), key=self.position)
        return tuple(by_position[stage * self.tensor_parallel :][: self.tensor_parallel])

    def placements(
        self, devices: Sequence[str], *, init_method: str | None = None, runtime: Runtime | None = None
    ) -> list[Placement]:
        """Returns one placement per rank, in rank order. `devices` has the device of each rank; the other arguments are
        the same for all."""
        return [
            Placement(rank=rank, layout=self, device=device, init_method=init_method, runtime=runtime)
            for rank, device in zip(range(self.num_ranks), devices, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Identifies a worker: a rank of a layout, and the device it runs on. Raises `ValueError` for a rank that the
    layout lacks."""

    device: str
    """torch device string: "cpu", "cuda:0"."""
    rank: int = 0
    layout: WorkerLayout = WorkerLayout()
    init_method: str | None = None
    """torch.distributed rendezvous ("tcp://127.0.0.1:port", "file://..."), the same for all ranks; None for a single
    rank."""
    runtime: Runtime | None = None
    """How the worker drives its device; None: one step at a time, without captured graphs."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.layout.num_ranks:
            raise ValueError(f"rank {self.rank} is not one of the {self.layout.num_ranks} ranks of its layout")

    @property
    def position(self) -> int:
        """Rank in torch.distributed: stage * tensor_parallel + tensor_rank."""
        return self.layout.position(self.rank)

    @property
    def tensor_rank(self) -> int:
        """Index of the worker's share of each layer: 0 <= tensor_rank < tensor_parallel."""
        return self.position % self.layout.tensor_parallel

    @property
    def tensor_parallel(self) -> int:
        """Workers that share each layer."""
        return self.layout.tensor_parallel

    @property
    def stage(self) -> int:
        """Index of the worker's group of layers: 0 <= stage < num_stages. Stage 0 embeds tokens, the last computes
        logits."""
        return self.position // self.layout.tensor_parallel

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.layout.num_stages

    @property
    def node(self) -> int:
        """Number of the worker's machine."""
        return self.layout.nodes[self.rank] if self.layout.nodes else 0

    @property
    def answers(self) -> bool:
        """Whether this rank samples, drafts, and returns the step's result; one rank of a layout does."""
        return self.rank == self.layout.answering_rank


@dataclass(frozen=True, kw_only=True)
class ExpectedWorkers:
    """Where an executor will run its workers, as far as it can say without starting anything; for those who read a
    config's explanation. Raises `ValueError` where its fields do not fit together."""

    layout: WorkerLayout
    devices: tuple[str, ...] = ()
    """torch device string of each rank on its machine; empty: not known."""
    nodes: tuple[str, ...] = ()
    """Machines by their number in `WorkerLayout.nodes`, in words ("this machine", "node a"); empty: not known."""
    transport: str | None = None
    """What carries plans and results, in words ("socket pair"); "": nothing, since the worker is called in the
    engine's process, so a step has no such messages; None: not known."""

    def __post_init__(self) -> None:
        if self.devices and len(self.devices) != self.layout.num_ranks:
            raise ValueError(f"devices names those of {len(self.devices)} ranks of {self.layout.num_ranks}")
        if self.nodes and len(self.nodes) <= max(self.layout.nodes, default=0):
            raise ValueError(f"nodes names {len(self.nodes)} machines, and the layout has more")

    def node(self, rank: int) -> str:
        """Returns the machine of a rank, in words; "" where it is not known."""
        return self.nodes[self.layout.nodes[rank] if self.layout.nodes else 0] if self.nodes else ""

    def device(self, rank: int) -> str:
        """Returns the device of a rank; "" where it is not known."""
        return self.devices[rank] if self.devices else ""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """How one worker is, as far as its executor knows without asking it; for those who watch an engine."""

    rank: int
    stage: int
    tensor_rank: int
    node: str = ""
    """Its machine, in words; "" where it is not known."""
    device: str = ""
    """As `Placement.device`."""
    pid: int | None = None
    """Process id on its machine."""
    is_alive: bool = True
    """False once its process ended, or its machine is gone."""
    silent_s: float | None = None
    """Seconds since it last reported; None where it does not report, or has not yet. A worker that is halted, or whose
    machine does not answer, falls silent; one that hangs in a step does not, and `running_s` grows."""
    memory_bytes: int | None = None
    """Resident memory of its process."""
    device_bytes: int | None = None
    """That tensors of its process take on its accelerator; None without one."""
    num_steps: int | None = None
    """This and the following as of the last report. Steps since the start."""
    busy_s: float | None = None
    """Seconds in steps since the start: computing, or waiting for other ranks in them."""
    last_step_s: float | None = None
    """Seconds of the last step that is done; None before the first."""
    running_s: float | None = None
    """Seconds for which the step runs that is under way; None where none is."""


@dataclass(frozen=True)
class StagedKVLayout(KVLayout):
    """The layout of a model whose layers pipeline stages share: "initialize_cache" takes it in place of a `KVLayout`.

    Its own fields are of the whole model, whose layers are numbered through all stages. Requests have one block table
    per group, which all stages use.
    """

    stages: tuple[KVLayout, ...] = ()
    """What the workers of each stage keep. The groups are those of the whole model with the stage's own layers,
    numbered as in its module (`ModelContext.attention_layers`); a group may have none."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What a worker holds, and what it can give to the KV cache, once its weights are loaded."""

    placement: Placement
    """The placement that the worker was given: the host compares it with what the config asks for."""
    caches: tuple[LayerCache, ...]
    """What each attention layer caches on this rank, by layer_id."""
    available_bytes: int
    """Bytes for KV pages: what the config gives, or its share of what the device has left after the weights."""
    extra_caches: Mapping[str, tuple[LayerCache, ...]] = field(default_factory=dict)
    """By owner (a drafter's name), what each attention layer caches that is not the model's own; on the rank that
    answers alone."""


class PendingStep(Protocol):
    """A step that was handed to the device."""

    def result(self) -> StepResult:
        """Waits for the step's tokens. Steps finish in the order in which they were submitted, so the result of a later
        step waits for those before it. Raises what the step raised."""


class Worker(Protocol):
    """One rank: a model shard, its KV pages and the model runner. Built by `WorkerSpec.create`.

    Its executor calls `load` once, then the other methods in the order of the engine's requests, one at a time: two
    threads never call a worker at once. At the end it calls `close`, unless the worker's process is gone.
    """

    def load(self) -> None:
        """Reads weights. Raises `ModelError`."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. Every rank runs the same plans in the same order. The engine uses the result of the answering
        rank (`Placement.answers`); other ranks may leave out parts of theirs."""

    def submit(self, plan: StepPlan) -> PendingStep | StepResult:
        """Hands one step to the device and returns before its tokens are known, or returns its result where the worker
        has to wait for it. The plan of the next step may name requests whose last token is not known yet: the worker
        finds it on the device. Any number of steps may be submitted; the worker waits for the oldest where it has too
        many. Raises what goes wrong while the step is handed over."""

    def call(self, method: str, *args: Any) -> Any:
        """Calls one of the worker's named operations: "describe" -> WorkerReport, "initialize_cache"(layout,
        num_blocks, num_host_blocks), "plugin_hash" -> str, "ping" -> rank, "prepare_sleep"(level, regions),
        "sleep"(level, regions) -> bytes given back, "cancel_sleep" after a rank could not prepare, and
        "wake_up"(new_weights, regions, for_update): no request may be in the batch, and what the KV pages held is lost.
        Level 1 sets weights aside, level 2 reads the checkpoint again: "wake_up" raises `ModelError` where the
        checkpoint changed meanwhile, unless `new_weights`. Regions are named as in `RegionStatus.name`, without which
        weights and KV cache are meant; those that sleep, or are awake, already stay so, since all ranks are asked again
        where one failed; "use_grammars"(compiler), before "initialize_cache": what compiles the grammars of requests,
        for the rank that answers; "forget_finished": drafters forget what they
        learned from finished requests; no request may be under way; "open_blocks"(namespace, max_queued_bytes) and
        "exchange_blocks"(orders) -> report, where the config names a KV connector: blocks leave and enter the KV
        pages, after the steps that were handed over before; "connect_weights"(init_info), "start_weights"(partial),
        "receive_weights"(update_info, drafter), "prepare_weights"(checksum) -> checksum, "commit_weights" and
        "abort_weights": the weights are replaced by what a `WeightTransport` receives, in this order; nothing is
        written before "commit_weights", which is called once "prepare_weights" succeeded on all ranks."""

    def close(self) -> None:
        """Frees what the worker holds. Idempotent."""


class WorkerSpec(Protocol):
    """How to build a worker, in this process or another. It pickles small: it holds the resolved config only."""

    @property
    def num_threads(self) -> int | None:
        """Threads that torch uses in each worker; None: the executor chooses."""

    def create(self, placement: Placement) -> Worker:
        """Loads the chosen plugins and builds the worker of one rank. Raises `PluginError` where this process lacks
        a plugin that the config names, before weights are read."""


class Executor(Plugin):
    """Runs steps on workers."""

    capabilities: ClassVar[ExecutorCapabilities] = ExecutorCapabilities()

    max_in_flight: ClassVar[int] = 1
    """How many plans the engine may hand over before the first is done, at least 1. With more than 1, the scheduling
    and the copies of a step overlap with the steps before: workers find sampled tokens themselves (`Worker.submit`).

    Pipeline stages do not need it. Where `ExecutorNeed.pipeline_parallel` is above 1, the engine hands over up to one
    plan more than there are stages, whatever `max_in_flight` is. These plans share no request, except that a prompt's
    next tokens may follow the ones before while these are in flight: every plan names its tokens (`StepPlan.sampled`),
    and no worker finds any itself."""

    is_interruptible: ClassVar[bool] = False
    """Whether another thread may call `shutdown` while a step or a call runs, and so end it: the future, or the call,
    then fails with `WorkerError` within seconds."""

    def __init__(self, options: PluginOptions, spec: WorkerSpec, need: ExecutorNeed):
        self.options = options
        self.spec = spec
        self.need = need

    @classmethod
    def environment(cls, options: Any, environment: Environment) -> Environment:
        """Returns the machine that the workers see. The host chooses all other plugins for this machine: every `check`,
        the executor's own too, gets it. `environment` describes this process's machine; the default returns it. Where
        workers run on several machines, return what all of them have. The host replaces `device_type` where the config
        names a device. Must not start workers."""
        return environment

    @classmethod
    def threads(cls, need: ExecutorNeed, options: Any, environment: Environment) -> ThreadCount | None:
        """Returns how many CPU threads each worker will compute with; None: not known before the start. The host asks
        where `executor.threads` is null, and `dovetail explain` shows the answer."""
        return None

    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: Any) -> ExpectedWorkers:
        """Returns where the workers will be, for `dovetail explain`; `check` had no objection. The default knows the
        stages alone. Must not start workers or wait for machines."""
        return ExpectedWorkers(
            layout=WorkerLayout(tensor_parallel=need.tensor_parallel, num_stages=need.pipeline_parallel)
        )

    @abstractmethod
    def start(self) -> None:
        """Creates the workers, one per rank of a `WorkerLayout` of `need.tensor_parallel` and `need.pipeline_parallel`,
        and has each load its weights. Raises what a worker raised, after all workers were stopped."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Hands a plan to every worker; the future has the result of the answering rank. Plans run in the order in
        which they are handed over, and futures are done in that order; each stage runs them in that order too, one
        stage while another runs the next. The future fails with `WorkerError` if a worker dies, naming its rank; where
        workers are processes of their own, also if one hangs for longer than an option of the executor allows."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls `Worker.call` on every rank and returns one answer per rank, in rank order. Each worker answers for
        itself; the host refuses an executor that returns more or fewer answers. The engine calls it between steps; a
        call that follows plans that are not done waits for those that have begun."""

    def rank_status(self) -> tuple[RankStatus, ...]:
        """Returns how each worker is, in rank order, for metrics and `dovetail top`; empty where nothing is known, as
        by default. Called from any thread, also while a step runs and after a worker died: it must not wait."""
        return ()

    @abstractmethod
    def shutdown(self) -> None:
        """Stops the workers and frees what they held. Idempotent; never raises for a worker that is gone."""
