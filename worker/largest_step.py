"""The largest step that a config allows: run once, it shows how much memory steps take, on top of weights and KV pages.

It goes through the sampler itself, and whatever else judges logits, with as many rows as a step can have, since what
they keep of each row (the logits, a copy with penalties, distributions) grows with the rows, to gigabytes for a
vocabulary of 128k. What they compute of the rows does not: they do it in groups (`row_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.contracts.kv import KVLayout
from dovetail.contracts.logits import LogitsProcessor, LogitsRequest, LogitsRow, LogitsSetup
from dovetail.contracts.model import CausalLM
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.contracts.step import NewRequest
from dovetail.worker.forward import EagerForward
from dovetail.worker.input_batch import StepInputs
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.stage_link import StageLink


@dataclass(frozen=True)
class JudgedRows:
    """Rows of logits of one step that something besides the sampler judges."""

    num_rows: int
    num_requests: int
    judge: Callable[[torch.Tensor, Sampler], object]
    """Takes logits [num_rows, vocab_size] and a sampler that knows the requests 0 to num_requests - 1."""


def largest_inputs(
    limits: SchedulerLimits, max_model_len: int, layout: KVLayout, *, has_adapters: bool = False
) -> StepInputs:
    """Prompts as long as may be, max_num_batched_tokens in all, whose pages are all block 0; with an adapter where
    there are any."""
    total = limits.max_num_batched_tokens
    lengths = [max_model_len] * (total // max_model_len)
    if total % max_model_len:
        lengths.append(total % max_model_len)
    counts = np.array(lengths[: limits.max_num_seqs], dtype=np.int32)
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    positions = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    table = np.zeros((len(counts), layout.blocks_for(int(counts.max()))), dtype=np.int32)
    slots = positions % layout.block_size
    return StepInputs(
        rows=np.arange(len(counts)),
        query_start=query_start,
        seq_lens=counts,
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        block_tables=[table for _ in layout.groups],
        slot_mappings=[slots for _ in layout.groups],
        num_drafts=np.zeros_like(counts),
        reaches_end=np.ones(len(counts), dtype=bool),
        adapter_slots=np.zeros(len(positions), dtype=np.int32) if has_adapters else None,
    )


class LargestStep:
    """Made for one run, by `Device.measure`."""

    def __init__(
        self,
        model: CausalLM,
        forward: EagerForward,
        inputs: StepInputs,
        limits: SchedulerLimits,
        vocab_size: int,
        operators: Operators,
        *,
        judged_rows: Callable[[torch.device], Sequence[JudgedRows]],
        link: StageLink,
        has_processors: bool = False,
    ):
        """`judged_rows`: called first, since what it makes is kept through the step; `link`: what enters the first
        layer; only the last stage draws; `has_processors`: whether rows are shown to logits processors."""
        self._model = model
        self._forward = forward
        self._inputs = inputs
        self._max_num_seqs = limits.max_num_seqs
        self._vocab_size = vocab_size
        self._operators = operators
        self._judged_rows = judged_rows
        self._link = link
        self._processors: Mapping[str, LogitsProcessor] = {"any": _Onlooker(vocab_size)} if has_processors else {}

    @torch.inference_mode()
    def run(self, device: torch.device) -> None:
        """The forward pass, while what came of the step before is kept; then one draw for each of max_num_seqs
        requests; then the judged rows."""
        judged = self._judged_rows(device)
        positions = torch.from_numpy(self._inputs.positions).to(device)
        entering = self._link.blank(len(positions), device)
        hidden, _layer_states = self._forward.run(self._inputs, entering, positions)  # both are kept to the step's end
        if not self._link.is_last:
            return
        self._sample(hidden)
        for rows in judged:
            rows.judge(self._logits(hidden, rows.num_rows), self._sampler(rows.num_requests))

    def _sample(self, hidden: torch.Tensor) -> None:
        count = min(self._max_num_seqs, len(hidden))
        sampler = self._sampler(count)
        sampler.sample(self._logits(hidden, count), list(range(count)), np.ones(count, dtype=np.int64))

    def _logits(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """Of `count` rows, which are gathered as in a step."""
        wanted = hidden[torch.arange(count, device=hidden.device)]
        # Zeros take as much memory, and are never NaN, from which nothing can be drawn.
        return self._model.compute_logits(wanted).zero_()

    def _sampler(self, count: int) -> Sampler:
        """With requests that take the most: penalties a copy of the logits, and a top_k that the highest few logits
        never settle a sort of whole rows."""
        sampler = Sampler(self._vocab_size, count, self._processors, self._operators)
        params = SamplingParams(
            temperature=1.0, top_k=max(1, self._vocab_size - 1), top_p=0.9, presence_penalty=0.5, max_tokens=None
        )
        for seq_id in range(count):
            sampler.add(NewRequest(seq_id, str(seq_id), [0], 1, 0, ([],), params, seed=seq_id))
        return sampler


class _Onlooker(LogitsProcessor):
    """Is shown a copy of every row, as processors are."""

    def __init__(self, vocab_size: int):
        super().__init__(PluginOptions(), LogitsSetup(vocab_size, (), None))

    def add_request(self, request: LogitsRequest) -> bool:
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        return None
