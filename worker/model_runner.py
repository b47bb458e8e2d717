"""The model runner: one plan in, tokens out, or states for the next pipeline stage. It owns the persistent batch;
attention, sampling and speculation are objects that it is given."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.device import Device, Event
from dovetail.contracts.executor import ANSWERING_TENSOR_RANK, PendingStep
from dovetail.contracts.logits import LogitsProcessor
from dovetail.contracts.model import CausalLM, ModelContext
from dovetail.contracts.step import StepPlan, StepResult, StepTimes, TokenLogprobs
from dovetail.nn import native
from dovetail.nn.host_copies import on_device
from dovetail.worker.adapters.slots import WorkerAdapters
from dovetail.worker.block_mover import BlockMover
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.forward import ForwardPass
from dovetail.worker.input_batch import InputBatch, StepInputs
from dovetail.worker.overlap.deferred import DeferredSteps
from dovetail.worker.pooling.pooling import PoolingRequests
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler
from dovetail.worker.sampling.grammar_masks import NO_DRAFT
from dovetail.worker.sampling.logprobs import token_logprobs
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.stage_link import OnlyStage, StageLink

# Those that speculate are imported where they are created: most starts need none.
if TYPE_CHECKING:
    from dovetail.worker.speculation.speculation import Speculation

_PROMPT_LOGPROB_ROWS = 128
"""Prompt positions whose logits are held at once: a row of float32 over a large vocabulary takes half a megabyte."""
_FEW_LOGITS = 1 << 22
"""One thread goes through so many in about two milliseconds."""


class ModelRunner:
    """Runs steps on one rank. The rank that answers samples, and sends the others what it drew."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: CausalLM,
        context: ModelContext,
        mover: BlockMover,
        forward: ForwardPass,
        device: Device,
        processors: Mapping[str, LogitsProcessor],
        grammars: GrammarCompiler | None,
        speculation: Speculation | None,
        batch: InputBatch,
        *,
        link: StageLink,
        answers: bool,
        pooling: PoolingRequests,
        adapters: WorkerAdapters | None = None,
    ):
        """`link`: to the pipeline stages before and behind. `answers`: whether this rank does (`Placement.answers`).
        `speculation`: None where nobody speculates. `pooling`: those that are pooled in place of sampling. `adapters`:
        None where there are none."""
        self._adapters = adapters
        self._pooling = pooling
        self._model = model
        self._device = context.device
        self._runtime_device = device
        self._communicator = context.communicator
        self._mover = mover
        self._forward = forward
        self._speculation = speculation
        self._batch = batch
        limits = config.limits
        self._sampler = Sampler(config.model.vocab_size, limits.max_num_seqs, processors, context.operators, grammars)
        self._deferred: DeferredSteps | None = None
        """None where steps cannot overlap: whoever speculates looks at each result before the next step."""
        self._link = link
        if speculation is None and context.communicator.size == 1 and isinstance(link, OnlyStage):
            sizes = limits.max_num_seqs, limits.max_num_batched_tokens
            self._deferred = DeferredSteps(device, model, forward, self._sampler, batch, *sizes)
        self._prompt_scored: set[int] = set()
        """Requests that ask for log probabilities of their prompts."""
        self._samples = answers

    @property
    def leaving(self) -> Mapping[int, Event]:
        """Device blocks that are being swapped out, and when that is done."""
        return self._mover.leaving

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. On ranks that do not sample, the result carries the tokens and nothing else."""
        started = time.perf_counter()
        self._begin(plan)
        return self._run_alone(plan, started)

    def submit(self, plan: StepPlan) -> PendingStep | StepResult:
        """Hands one step over. Waits for its result if the host has to see what it computed."""
        started = time.perf_counter()
        self._begin(plan)
        awaited = self._prompt_scored or self._pooling
        if self._deferred is not None and not awaited and self._sampler.can_defer(plan.seq_ids):
            inputs = self._batch.prepare(plan)
            indices = np.flatnonzero(inputs.reaches_end)
            return self._deferred.start(plan, inputs, indices, [plan.seq_ids[index] for index in indices.tolist()])
        return self._run_alone(plan, started)

    def _run_alone(self, plan: StepPlan, started: float) -> StepResult:
        """A whole step, after everything that was handed over before it."""
        if self._deferred is not None and self._deferred.under_way:
            self._deferred.settle()
        results: list[StepResult] = []
        # Handed over like other work, so that it runs in the same stream.
        self._runtime_device.launch(lambda: results.append(self._run(plan, started)))
        self._runtime_device.synchronize()
        return results[0]

    def _begin(self, plan: StepPlan) -> None:
        """Applies what the plan changes."""
        if self._speculation is not None:
            self._speculation.begin(plan)
        for seq_id in (*plan.finished, *plan.preempted):
            self._leave(seq_id)
        if not self._link.is_last:
            self._batch.catch_up(plan)
        if self._mover.leaving or plan.swap_out or plan.swap_in or plan.copies:
            self._mover.move(plan)
        if plan.adapters and self._adapters is not None:
            self._adapters.place(plan.adapters)
        self._batch.apply(plan)
        if self._samples:
            for request in plan.new_requests:
                if request.pooling is None:
                    self._sampler.add(request)
        self._note_new(plan)

    @torch.inference_mode()
    def _run(self, plan: StepPlan, started: float) -> StepResult:
        """A step from its inputs to its result, when everything before it is settled."""
        inputs = self._batch.prepare(plan)
        if self._speculation is not None:
            self._speculation.prepare(plan, inputs)
        if self._sampler.grammars.wants(plan.seq_ids):
            self._start_masks(plan, inputs)
        prepared = time.perf_counter()
        ids, positions = self._to_device(inputs.input_ids), self._to_device(inputs.positions)
        hidden, own_states = self._forward.run(inputs, self._link.entering(ids), positions)
        layer_states = self._link.joined(own_states)
        self._batch.num_computed[inputs.rows] = inputs.seq_lens
        computed = time.perf_counter()
        times = StepTimes(prepare=1e3 * (prepared - started), forward=1e3 * (computed - prepared))
        if not self._link.is_last:
            self._link.send(hidden, layer_states)
            return StepResult(plan.step_id, [], times=times)
        step = ComputedStep(plan, inputs, self._batch, hidden, layer_states)
        self._sample(step)
        prompt_logprobs = self._prompt_logprobs(plan, inputs, hidden)
        pooled = self._pooling.pool(step) if self._pooling else {}
        drawn = time.perf_counter()
        result = StepResult(
            step_id=plan.step_id,
            token_ids=step.flat_tokens(),
            counts=step.counts_or_none(),
            logprobs=step.logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=step.failed,
            pooled=pooled,
            times=replace(times, sample=1e3 * (drawn - computed)),
        )
        return result if self._speculation is None else self._speculation.propose(step, self._sampler, result)

    def forget_finished(self) -> None:
        """What finished requests taught whoever speculates is dropped; none may be under way."""
        if self._speculation is not None:
            self._speculation.forget_finished()

    def close(self) -> None:
        """No more steps come: requests that are here have ended."""
        if self._speculation is not None:
            self._speculation.finish_all()

    def _start_masks(self, plan: StepPlan, inputs: StepInputs) -> None:
        drafted = {} if self._speculation is None else self._speculation.paths(plan)
        indices = np.flatnonzero(self._samples_at(plan, inputs)).tolist()
        self._sampler.start_masks([(plan.seq_ids[index], drafted.get(index, NO_DRAFT)) for index in indices])

    def _samples_at(self, plan: StepPlan, inputs: StepInputs) -> np.ndarray:
        """bool [R]: which requests get a token: their last known one is computed, and they are not pooled."""
        if not self._pooling:
            return inputs.reaches_end
        return inputs.reaches_end & ~self._pooling.among(plan.seq_ids)

    def _leave(self, seq_id: int) -> None:
        self._batch.remove(seq_id)
        self._sampler.remove(seq_id)
        self._prompt_scored.discard(seq_id)
        self._pooling.remove(seq_id)

    def _note_new(self, plan: StepPlan) -> None:
        for request in plan.new_requests:
            if self._deferred is not None:
                self._deferred.forget(self._batch.requests[request.seq_id].row)
            self._pooling.add(request)
            if request.sampling.prompt_logprobs is not None:
                self._prompt_scored.add(request.seq_id)

    def _sample(self, step: ComputedStep) -> None:
        """Draws or verifies for every request whose last known token was computed."""
        plain = np.flatnonzero(self._samples_at(step.plan, step.inputs) & (step.inputs.num_drafts == 0))
        if len(plain):
            self._sample_plain(step, plain)
        if self._speculation is not None:
            self._speculation.verify(step, self._sampler)

    def _sample_plain(self, step: ComputedStep, indices: np.ndarray) -> None:
        """Draws one token for each of `indices`: int64 [N], batch indices."""
        plan, inputs, hidden = step.plan, step.inputs, step.hidden
        last = inputs.query_start[indices + 1].astype(np.int64) - 1
        wanted = hidden if len(last) == len(hidden) else hidden[self._to_device(last)]
        logits = self._model.compute_logits(wanted)
        if self._speculation is not None:
            self._speculation.note_plain(logits, step, indices)
        rows = inputs.rows[indices]
        if self._samples:
            seq_ids = [plan.seq_ids[index] for index in indices.tolist()]
            with _sampling_threads(logits):
                output = self._sampler.sample(logits, seq_ids, self._batch.num_tokens[rows].astype(np.int64))
            token_ids = output.token_ids
            for row, message in output.failed.items():
                step.failed[int(indices[row])] = message
            for row, entry in output.logprobs.items():
                step.logprobs[int(indices[row])] = [entry]
        else:
            token_ids = np.empty(len(indices), dtype=np.int64)
        if self._communicator.size > 1:
            drawn_ids = self._communicator.broadcast(self._to_device(token_ids), ANSWERING_TENSOR_RANK)
            token_ids = drawn_ids.cpu().numpy()
        drawn = token_ids >= 0
        if drawn.all():
            self._batch.append(rows, token_ids)
        else:
            self._batch.append(rows[drawn], token_ids[drawn])
        step.tokens[indices, 0] = token_ids
        step.counts[indices] = drawn

    def _prompt_logprobs(
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """Log probabilities of the prompt tokens that this step's rows predict, for requests that ask: by batch index,
        the position of the first of these tokens and an entry for each."""
        found = {}
        for index, seq_id in enumerate(plan.seq_ids if self._prompt_scored else ()):
            if seq_id not in self._prompt_scored:
                continue
            request = self._batch.requests[seq_id].request
            num_top = request.sampling.prompt_logprobs
            first = int(inputs.seq_lens[index]) - plan.num_tokens[index]
            if num_top is None or first + 1 >= request.num_prompt_tokens:
                self._prompt_scored.discard(seq_id)
                continue
            count = min(plan.num_tokens[index], request.num_prompt_tokens - 1 - first)
            start = int(inputs.query_start[index])
            targets = np.asarray(request.token_ids[first + 1 : first + 1 + count], dtype=np.int64)
            entries: list[TokenLogprobs] = []
            for offset in range(0, count, _PROMPT_LOGPROB_ROWS):
                end = min(offset + _PROMPT_LOGPROB_ROWS, count)
                logits = self._model.compute_logits(hidden[start + offset : start + end])
                if self._samples:
                    entries += token_logprobs(logits, targets[offset:end], num_top)
            found[index] = (first + 1, entries)
        return found

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return on_device(array, self._device)


def _sampling_threads(logits: torch.Tensor) -> AbstractContextManager[None]:
    """One for a few logits: torch's threads would go on to spin while the native kernels of the next step run."""
    is_slow = logits.device.type != "cpu" or logits.numel() > _FEW_LOGITS
    return nullcontext() if is_slow else native.torch_alone()
