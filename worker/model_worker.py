"""One rank, as executors see it: a loaded model, and with a KV cache a running or a sleeping worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.executor import PendingStep, Placement
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.logits import LogitsSetup
from dovetail.contracts.pausing import check_level
from dovetail.contracts.regions import KV_CACHE, WEIGHTS
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.worker.block_exchange import BlockExchange, open_exchange
from dovetail.worker.draft_tokenizers import DraftTokenizers
from dovetail.worker.exchange_orders import ExchangeOrders, ExchangeReport
from dovetail.worker.loaded_model import LoadedModel, load_model
from dovetail.worker.running_worker import RunningWorker, initialize_cache
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler
from dovetail.worker.sleeping_worker import SleepingWorker
from dovetail.worker.weight_update.updater import WeightUpdater
from dovetail.worker.worker_setup import leave_group, set_up

logger = logging.getLogger(__name__)

State = TypeVar("State")


class ModelWorker:
    """Built by `ModelWorkerSpec.create`; see `dovetail.contracts.executor.Worker` for its life.

    Calls that come in another order raise `PluginError`, since the order is the executor's.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        placement: Placement,
        logits: LogitsSetup | None = None,
        tokenizers: DraftTokenizers | None = None,
    ):
        self._setup = set_up(config, placement, logits, tokenizers or DraftTokenizers())
        self._grammars: GrammarCompiler | None = None
        self._loaded: LoadedModel | None = None
        self._running: RunningWorker | None = None
        """None while its weights or its KV cache sleep, too."""
        self._sleeping: SleepingWorker | None = None
        self._updater: WeightUpdater | None = None
        """Made for the first weight update."""
        self._exchange: BlockExchange | None = None
        """None where the config names no KV connector."""

    def load(self) -> None:
        """As `Worker.load`. Raises `CapacityError` for a device that cannot hold the weights."""
        self._loaded = load_model(self._setup)

    def execute(self, plan: StepPlan) -> StepResult:
        """As `Worker.execute`."""
        return self._in_order("execute", self._running).runner.execute(plan)

    def submit(self, plan: StepPlan) -> PendingStep | StepResult:
        """As `Worker.submit`."""
        return self._in_order("submit", self._running).runner.submit(plan)

    def call(self, method: str, *args: Any) -> Any:
        """The named operations of the contract."""
        operations: Mapping[str, Any] = {
            "describe": lambda: self._in_order("describe", self._loaded).report(),
            "initialize_cache": self._initialize_cache,
            "plugin_hash": lambda: self._setup.plugins.plugin_hash,
            "ping": lambda: self._setup.placement.rank,
            "prepare_sleep": self._prepare_sleep,
            "cancel_sleep": self._cancel_sleep,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "forget_finished": self._forget_finished,
            "open_blocks": self._open_blocks,
            "exchange_blocks": self._exchange_blocks,
            "use_grammars": self._use_grammars,
            "connect_weights": lambda *args: self._weights().connect(*args),
            "start_weights": lambda *args: self._weights().start(*args),
            "receive_weights": lambda *args: self._weights().receive(*args),
            "prepare_weights": lambda *args: self._weights().prepare(*args),
            "commit_weights": lambda: self._weights().commit(),
            "abort_weights": lambda: self._weights().abort(),
        }
        if method not in operations:
            raise ConfigError(f"workers have no operation {method!r}; they have {', '.join(operations)}")
        return operations[method](*args)

    def _open_blocks(self, namespace: bytes, max_queued_bytes: int) -> None:
        """A store for blocks of pages with this identity, in place of the one before."""
        running = self._in_order("open_blocks", self._running)
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = open_exchange(running, namespace, max_queued_bytes)

    def _exchange_blocks(self, orders: ExchangeOrders) -> ExchangeReport:
        self._in_order("exchange_blocks", self._running)
        if self._exchange is None:
            raise PluginError("the executor called exchange_blocks before open_blocks")
        return self._exchange.exchange(orders)

    def close(self) -> None:
        """Ends the requests that are left, waits for the device, frees weights and KV pages, and leaves the process
        group."""
        self._end_requests()
        if self._updater is not None:
            self._updater.close()
        if self._exchange is not None:
            self._exchange.close()
        running = self._with_cache()
        if self._sleeping is not None:
            self._sleeping.close()
        if running is not None:
            self._finish_work()
            running.forward.release()  # graphs hold collectives of the group that is left below
        self._loaded = self._running = self._sleeping = self._updater = None
        if self._grammars is not None:
            self._grammars.close()
        leave_group(self._setup.placement)

    def _initialize_cache(self, layout: KVLayout, num_blocks: int, num_host_blocks: int) -> None:
        """Again for a cache in place of the one that is there."""
        loaded = self._in_order("initialize_cache", None if self._sleeping is not None else self._loaded)
        self._end_requests()
        self._setup.device.synchronize()  # swaps may still read and write the pages that are freed here
        self._running = initialize_cache(loaded, layout, num_blocks, num_host_blocks, self._grammars)

    def _use_grammars(self, grammars: GrammarCompiler) -> None:
        """What compiles the grammars of requests, from the next KV cache on; other ranks than the one that answers need
        none."""
        if self._setup.placement.answers:
            self._grammars = grammars
            grammars.read_ahead()

    def _prepare_sleep(self, level: int, names: Sequence[str]) -> None:
        check_level(level)
        if self._sleeping is None:
            self._sleeping = SleepingWorker(self._in_order("sleep", self._running))
        try:
            self._sleeping.prepare(level, names)
        except BaseException:
            self._note_regions()
            raise

    def _cancel_sleep(self) -> None:
        if self._sleeping is not None:
            self._sleeping.cancel()
            self._note_regions()

    def _sleep(self, level: int, names: Sequence[str] = (WEIGHTS, KV_CACHE)) -> int:
        if self._sleeping is None or not self._sleeping.is_prepared:
            self._prepare_sleep(level, names)
        sleeping = self._sleeping
        assert sleeping is not None
        given_back = sleeping.give_memory_back()
        self._note_regions()
        return given_back

    def _wake_up(
        self, new_weights: bool = False, names: Sequence[str] = (WEIGHTS, KV_CACHE), for_update: bool = False
    ) -> None:
        if self._sleeping is not None:
            self._sleeping.wake_up(names, new_weights=new_weights, for_update=for_update)
            self._note_regions()

    def _note_regions(self) -> None:
        sleeping = self._sleeping
        if sleeping is not None:
            self._running = sleeping.running if sleeping.can_run else None
            self._sleeping = None if sleeping.is_awake else sleeping

    def _weights(self) -> WeightUpdater:
        if self._updater is None:
            self._updater = WeightUpdater(self._in_order("connect_weights", self._loaded))
        return self._updater

    def _forget_finished(self) -> None:
        self._in_order("forget_finished", self._with_cache()).runner.forget_finished()

    def _end_requests(self) -> None:
        """Those that the runner still knows: what ended since the last step is told with the next one."""
        running = self._with_cache()
        if running is not None:
            running.runner.close()

    def _finish_work(self) -> None:
        """Nothing that was handed over, swaps among it, may read or write memory that is freed. What that work raises,
        a lost device among it, keeps nothing from being freed."""
        try:
            self._setup.device.synchronize()
        except Exception:
            logger.debug("the device's last work failed", exc_info=True)

    def _with_cache(self) -> RunningWorker | None:
        """Awake or asleep."""
        return self._running if self._sleeping is None else self._sleeping.running

    def _in_order(self, method: str, state: State | None) -> State:
        """What `method` needs of the worker. Raises `PluginError` for None: the executor called it too early, or too
        late."""
        if state is not None:
            return state
        if self._sleeping is not None:
            problem, remedy = "while the worker sleeps", "wake_up comes first"
        elif self._loaded is not None:
            problem, remedy = "before the worker has a KV cache", "initialize_cache comes first"
        else:
            problem, remedy = "while the worker has no model", "load comes first, and nothing follows close"
        raise PluginError(
            f"the executor called {method} on rank {self._setup.placement.rank} {problem}: {remedy}. It must pass on"
            " calls and steps in the order in which it was asked"
        )
