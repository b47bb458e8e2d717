"""vLLM's executor for the same measurement as `null_engine.PacedTokens`: random tokens, one step every so many
milliseconds. vLLM's Python imports this file as the module `vllm_null`; nothing of Dovetail is imported.

    vllm serve MODEL --distributed-executor-backend vllm_null.PacedTokens --additional-config '{"step_ms": 10}'
"""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput


class PacedTokens(Executor):
    """Returns random letters."""

    def _init_executor(self) -> None:
        draw = random.Random(0)
        self._tokens = [[draw.randrange(64, 90)] for _ in range(4096)]
        self._step_s = self.vllm_config.additional_config["step_ms"] / 1000
        self._missing: dict[str, int] = {}
        self._due = 0.0

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """One token for each request whose prompt is complete after this step."""
        for request in scheduler_output.scheduled_new_reqs:
            self._missing[request.req_id] = len(request.prompt_token_ids) - request.num_computed_tokens
        for req_id in scheduler_output.finished_req_ids:
            self._missing.pop(req_id, None)
        sampled = []
        for index, (req_id, count) in enumerate(scheduler_output.num_scheduled_tokens.items()):
            self._missing[req_id] -= count
            is_complete = self._missing[req_id] <= 0
            sampled.append(self._tokens[index] if is_complete else [])
            if is_complete:
                self._missing[req_id] = 1
        self._pace()
        req_ids = list(scheduler_output.num_scheduled_tokens)
        indices = {req_id: index for index, req_id in enumerate(req_ids)}
        output = ModelRunnerOutput(req_ids=req_ids, req_id_to_index=indices, sampled_token_ids=sampled)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def _pace(self) -> None:
        now = time.perf_counter()
        if self._due > now:
            time.sleep(self._due - now)
        self._due = max(now, self._due) + self._step_s

    # What the engine asks of workers; there are none.

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [{"layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        pass

    def determine_available_memory(self) -> list[int]:
        return [1 << 30]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[None]:
        return [None]

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
