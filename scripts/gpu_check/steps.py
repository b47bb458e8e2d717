"""Drives a worker with step plans, without an engine: decodes at any context without computing the context first."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from common import HERE, Arguments, engine_sections

from dovetail.config.load import load_config
from dovetail.contracts.executor import ExecutorNeed, WorkerReport
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.step import NewRequest, StepPlan
from dovetail.engine.resolving import resolve
from dovetail.worker.kv_layout import build_layout
from dovetail.worker.spec import ModelWorkerSpec

sys.path.insert(0, str(HERE))


class Stepper:
    """One executor over the model of random weights, and blocks handed out by hand."""

    def __init__(self, arguments: Arguments, directory: Path, sections: dict[str, Any] | None = None):
        from timed import TimedExecutor

        self.config = resolve(load_config(sections or engine_sections(arguments, directory)))
        options = TimedExecutor.Options.model_validate(dict(self.config.executor.options))
        need = ExecutorNeed(self.config.device_type)
        self.executor = TimedExecutor(options, ModelWorkerSpec(self.config), need)  # type: ignore[arg-type]
        started = time.perf_counter()
        self.executor.start()
        self.load_s = time.perf_counter() - started
        report: WorkerReport
        (report,) = self.executor.call("describe")
        self.layout: KVLayout = build_layout(report.caches, self.config.cache.block_size)
        self.num_blocks = self.config.cache.num_blocks or report.available_bytes // self.layout.block_bytes
        started = time.perf_counter()
        self.executor.call("initialize_cache", self.layout, self.num_blocks, 0)
        self.capture_s = time.perf_counter() - started
        self._step_id = 0
        self._next_seq_id = 0
        self._seq_ids: list[int] = []

    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return (self.num_blocks - 1) * self.layout.block_size

    def requests(self, count: int, num_computed: int, num_tokens: int, most: int) -> list[NewRequest]:
        """Greedy requests with blocks for `most` tokens each, of whose `num_tokens` tokens `num_computed` count as
        computed."""
        width = self.layout.blocks_for(most)
        requests = []
        for index in range(count):
            first = 1 + index * width
            tables = tuple(list(range(first, first + width)) for _ in self.layout.groups)
            requests.append(
                NewRequest(
                    seq_id=self._next_seq_id,
                    request_id=f"r{self._next_seq_id}",
                    token_ids=[(7 * index + 13 * place) % 500 + 2 for place in range(num_tokens)],
                    num_prompt_tokens=num_tokens,
                    num_computed_tokens=num_computed,
                    block_ids=tables,
                    sampling=SamplingParams(temperature=0.0, max_tokens=10**6, ignore_eos=True),
                    seed=index,
                )
            )
            self._next_seq_id += 1
        return requests

    def plan(self, requests: list[NewRequest], num_tokens: int) -> StepPlan:
        """A first step of new requests, `num_tokens` each; those of before leave."""
        gone, self._seq_ids = self._seq_ids, [request.seq_id for request in requests]
        self._step_id += 1
        return StepPlan(
            self._step_id, self._seq_ids, [num_tokens] * len(self._seq_ids), new_requests=requests, finished=gone
        )

    def again(self) -> StepPlan:
        """One more token for each."""
        self._step_id += 1
        return StepPlan(self._step_id, self._seq_ids, [1] * len(self._seq_ids))

    def decode_seconds(
        self, count: int, context: int, num_steps: int, more: int = 0
    ) -> tuple[float, list[float], list[float]]:
        """Seconds per step of `count` requests at `context` tokens, with two steps in flight as the engine has them;
        and the device's busy times and gaps. The requests have blocks for `more` steps after these."""
        warm = 3
        requests = self.requests(count, context - 1, context, context + num_steps + warm + more + 2)
        self.executor.execute(self.plan(requests, 1)).result()
        for _ in range(warm):
            self.executor.execute(self.again()).result()
        clock = self.executor.clock
        clock.synchronize()
        clock.marks.clear()
        started = time.perf_counter()
        last = self.executor.execute(self.again())
        for _ in range(num_steps - 1):
            following = self.executor.execute(self.again())
            last.result()
            last = following
        last.result()
        return (time.perf_counter() - started) / num_steps, clock.busy(), clock.gaps()

    def close(self) -> None:
        """Frees everything."""
        self.executor.shutdown()
