"""An executor that returns random tokens, one step every so many milliseconds: what is left of a server is its front
end."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dovetail.contracts.executor import Executor, ExecutorCapabilities, Placement, WorkerReport
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

VOCAB_SIZE = 256


class PacedOptions(PluginOptions):
    """Options of `PacedTokens`."""

    step_ms: float = 0.0
    """Least time from the begin of one step to the begin of the next."""


class PacedTokens(Executor):
    """Returns random letters."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = ExecutorCapabilities(device_types=frozenset({"cpu"}))
    Options = PacedOptions

    def start(self) -> None:
        """Draws the tokens in advance, so that a step pays for none."""
        draw = random.Random(0)
        self._tokens = [draw.randrange(64, 90) for _ in range(4096)]
        self._missing: dict[int, int] = {}
        self._due = 0.0

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """One token for each request whose prompt is complete after this plan."""
        counts = None
        for request in plan.new_requests:
            self._missing[request.seq_id] = len(request.token_ids) - request.num_computed_tokens
        if plan.new_requests or any(count > 1 for count in plan.num_tokens):
            counts = []
            for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
                self._missing[seq_id] -= count
                counts.append(int(self._missing[seq_id] <= 0))
                if counts[-1]:
                    self._missing[seq_id] = 1
        size = sum(counts) if counts is not None else len(plan.seq_ids)
        self._pace()
        future: Future[StepResult] = Future()
        future.set_result(StepResult(plan.step_id, self._tokens[:size], counts))
        return future

    def call(self, method: str, *args: Any) -> list[Any]:
        """A small cache, and the plugin set of this process."""
        if method == "describe":
            spec = KVSpec(num_kv_heads=1, head_size=16, dtype="float32")
            return [WorkerReport(placement=Placement(device="cpu"), caches=(spec,), available_bytes=1 << 30)]
        if method == "plugin_hash":
            return [self.spec.config.plugin_hash]  # type: ignore[attr-defined]
        return [None]

    def shutdown(self) -> None:
        """Holds nothing."""

    def _pace(self) -> None:
        now = time.perf_counter()
        if self._due > now:
            time.sleep(self._due - now)
        assert isinstance(self.options, PacedOptions)
        self._due = max(now, self._due) + self.options.step_ms / 1000


def save_null_model(directory: Path, max_model_len: int = 1 << 17) -> None:
    """A model that is never computed, and a tokenizer with one token per byte."""
    save_tiny_model(directory, tiny_config("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=max_model_len))
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: token for token, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def null_config(
    model: Path, *, step_ms: float, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192
) -> dict[str, Any]:
    """The sections of an engine whose executor is `PacedTokens`."""
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "executor": {"name": f"{Path(__file__).resolve()}:PacedTokens", "step_ms": step_ms},
        "cache": {"memory_gib": 1.0},
        "scheduler": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens},
    }
