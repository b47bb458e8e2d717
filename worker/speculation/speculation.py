"""Speculation in the runner: drafts are verified in the step after the one that proposed them.

The rank that answers drafts and judges, and sends the other ranks one small tensor of each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.executor import ANSWERING_TENSOR_RANK
from dovetail.contracts.model import CausalLM, ModelContext
from dovetail.contracts.speculation import Draft
from dovetail.contracts.step import DraftCounts, DraftTokens, StepPlan, StepResult
from dovetail.nn.host_copies import on_device
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.input_batch import InputBatch, StepInputs
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.drafting import Drafting
from dovetail.worker.speculation.rules import Rules
from dovetail.worker.speculation.verifier import DraftedRequest, Verifier, draft_paths, first_nodes


class Speculation:
    """Verifies the drafts of one step and lets those of the next be proposed.

    In every step the runner calls `begin`, `prepare`, `verify` and `propose`; the host sees each result before the next
    step.
    """

    def __init__(
        self,
        drafting: Drafting,
        rules: Rules,
        model: CausalLM,
        context: ModelContext,
        layers: Sequence[tuple[int, AttentionModule]],
        batch: InputBatch,
        max_drafts: int,
        answers: bool,
    ):
        self._drafting = drafting
        self._batch = batch
        self._max_drafts = max_drafts
        """Most drafts of a request in one step."""
        self._rules = rules
        self._model = model
        self._communicator = context.communicator
        self._layers = layers
        self._answers = answers
        self._has_other_stages = not context.is_first_stage
        self._device = context.device
        self._waiting: dict[int, Draft] = {}
        """By seq_id, drafts that wait for verification; their tokens lie in the batch behind the known ones."""
        # Of the step that runs, by batch index; as in `StepResult`.
        self._draft_counts: dict[int, DraftCounts] = {}
        self._drafter_errors: dict[int, str] = {}

    def begin(self, plan: StepPlan) -> None:
        """Requests come and go, before the batch takes in the plan."""
        self._draft_counts, self._drafter_errors = {}, {}
        for seq_id in plan.finished:
            self._drafting.finish(seq_id, self._batch)
            self._waiting.pop(seq_id, None)
        for seq_id in plan.preempted:
            self._drafting.pause(seq_id, self._batch)
            self._waiting.pop(seq_id, None)
        self._drafting.blocks_moved(plan)
        for request in plan.new_requests:
            self._drafting.add(request)

    def finish_all(self) -> None:
        """Every request that is known here has ended."""
        self._drafting.finish_all(self._batch)

    def forget_finished(self) -> None:
        """As `finish_all`, and what requests taught is dropped too."""
        # Plans tell of ends with the next step: too late, its answer would be learned then.
        self._drafting.finish_all(self._batch)
        self._drafting.forget_finished()

    def prepare(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Positions and masks of the drafts that the step computes as trees."""
        for index, count in enumerate(plan.num_drafts or ()):
            if count and self._waiting[plan.seq_ids[index]].is_tree:
                _place_tree(inputs, index, first_nodes(self._waiting[plan.seq_ids[index]], count))

    def paths(self, plan: StepPlan) -> dict[int, list[list[int]]]:
        """By batch index, for requests whose drafts the step computes: the draft tokens that lead to each row."""
        return {
            index: draft_paths(first_nodes(self._waiting[plan.seq_ids[index]], count))
            for index, count in enumerate(plan.num_drafts or ())
            if count
        }

    def verify(self, step: ComputedStep, sampler: Sampler) -> None:
        """Judges the drafts that the step computed; accepted ones and the token after them go to `step`."""
        if step.plan.num_drafts is None:
            return
        plan, inputs, batch, hidden = step.plan, step.inputs, step.batch, step.hidden
        indices: list[int] = np.flatnonzero(inputs.reaches_end & (inputs.num_drafts > 0)).tolist()
        if not indices:
            return
        requests: list[DraftedRequest] = []
        rows: list[int] = []
        for index in indices:
            seq_id, count = plan.seq_ids[index], int(inputs.num_drafts[index])
            draft = first_nodes(self._waiting[seq_id], count)
            requests.append(DraftedRequest(seq_id, int(batch.num_tokens[inputs.rows[index]]), draft))
            if self._answers:
                self._drafting.computed(seq_id, count)
            end = int(inputs.query_start[index + 1])
            rows += range(end - count - 1, end)
        wanted = hidden if len(rows) == len(hidden) else hidden[on_device(np.array(rows, dtype=np.int64), self._device)]
        logits = self._model.compute_logits(wanted)
        if self._answers and self._drafting.reads_logits:
            parents = [[-1, *(parent + 1 for parent in request.draft.parent_indices)] for request in requests]
            self._drafting.note_logits(
                logits, inputs.input_ids[rows], [request.seq_id for request in requests], parents
            )
        verdicts = self._judge(logits, requests, indices, sampler, step)
        for index, request, (nodes, token) in zip(indices, requests, verdicts, strict=True):
            self._commit(index, request, nodes, token, step)

    def note_plain(self, logits: torch.Tensor, step: ComputedStep, indices: np.ndarray) -> None:
        """The step computed `logits` after the last known token of each of `indices`, requests without drafts."""
        if self._answers and self._drafting.reads_logits:
            last = step.inputs.query_start[indices + 1].astype(np.int64) - 1
            seq_ids = [step.plan.seq_ids[index] for index in indices.tolist()]
            self._drafting.note_logits(logits, step.inputs.input_ids[last], seq_ids, [[-1]] * len(seq_ids))

    def propose(self, step: ComputedStep, sampler: Sampler, result: StepResult) -> StepResult:
        """Drafts for the next step wait. Returns the step's result with what became of its drafts, how many wait now,
        what went wrong and the time that proposing took."""
        started = time.perf_counter()
        drafts: dict[int, Draft] = {}
        idle: frozenset[str] = frozenset()
        num_requests, times = len(step.plan.seq_ids), result.times
        if self._answers:
            num_known = step.inputs.query_start[-1] - step.inputs.num_drafts.sum()
            seconds = 1e-3 * (times.prepare + times.forward + times.sample)
            is_decode = num_known == num_requests
            drafts = self._drafting.propose(step, sampler, seconds if is_decode else None, self._drafter_errors)
            idle = self._drafting.idle_drafters(num_requests)
        drafts = self._share_drafts(drafts, step.plan)
        for index, seq_id in enumerate(step.plan.seq_ids):
            self._keep(seq_id, drafts.get(index))
        others = drafts if self._has_other_stages else {}
        return replace(
            result,
            num_next_drafts={index: len(draft.token_ids) for index, draft in drafts.items()},
            next_drafts={index: DraftTokens(list(draft.token_ids)) for index, draft in others.items()},
            draft_counts=self._draft_counts,
            drafter_errors=self._drafter_errors,
            idle_drafters=idle,
            times=replace(times, draft=1e3 * (time.perf_counter() - started)),
        )

    def _keep(self, seq_id: int, draft: Draft | None) -> None:
        """What waits of a request from now on."""
        if draft is None:
            self._waiting.pop(seq_id, None)
        else:
            self._waiting[seq_id] = draft
            self._batch.write_ahead(seq_id, draft.token_ids)

    def _judge(
        self,
        logits: torch.Tensor,
        requests: list[DraftedRequest],
        indices: list[int],
        sampler: Sampler,
        step: ComputedStep,
    ) -> list[tuple[list[int], int]]:
        """Accepted nodes and the next token of each request, -1 for requests that failed; the same on every rank."""
        table = np.full((len(requests), self._max_drafts + 2), -1, dtype=np.int64)
        if self._answers:
            output = Verifier(self._rules, sampler).verify(logits, requests)
            for row, index in enumerate(indices):
                if row in output.faults:
                    self._drafter_errors[index] = output.faults[row]
                if row in output.failed:
                    step.failed[index] = output.failed[row]
                    continue
                nodes = output.accepted[row]
                table[row, 0] = output.token_ids[row][-1]
                table[row, 1] = len(nodes)
                table[row, 2 : 2 + len(nodes)] = nodes
                if row in output.logprobs:
                    step.logprobs[index] = output.logprobs[row]
        table = self._broadcast(table)
        return [(row[2 : 2 + max(row[1], 0)].tolist(), int(row[0])) for row in table]

    def _commit(
        self,
        index: int,
        request: DraftedRequest,
        nodes: list[int],
        token: int,
        step: ComputedStep,
    ) -> None:
        entry = step.batch.requests[request.seq_id]
        if token < 0:
            return
        if nodes != list(range(len(nodes))):
            self._compact(index, request, nodes, step.inputs)
        # What is computed and stays: the known tokens and the accepted drafts.
        step.batch.num_computed[entry.row] = request.position + len(nodes)
        tokens = [request.draft.token_ids[node] for node in nodes] + [token]
        step.batch.extend(entry.row, tokens)
        step.put(index, tokens)
        if not self._answers:
            return
        drafted = len(request.draft.token_ids)
        drafter = self._drafting.judged(request.seq_id, drafted, nodes)
        depth = max(request.draft.depths, default=0)
        self._draft_counts[index] = DraftCounts(drafted, len(nodes), drafter, depth, request.draft.from_prediction)

    def _compact(self, index: int, request: DraftedRequest, nodes: list[int], inputs: StepInputs) -> None:
        """Moves the KV of an accepted path through a tree to the slots right behind the known tokens."""
        first = int(inputs.query_start[index + 1]) - len(request.draft.token_ids)
        for group_id, layer in self._layers:
            slots = inputs.slot_mappings[group_id]
            source = on_device(slots[[first + node for node in nodes]], self._device)
            target = on_device(slots[first : first + len(nodes)].copy(), self._device)
            layer.move_slots(source, target)

    def _share_drafts(self, drafts: dict[int, Draft], plan: StepPlan) -> dict[int, Draft]:
        """The same drafts on every rank; probabilities stay where they are used."""
        if self._communicator.size == 1:
            return drafts
        most = self._max_drafts
        table = np.full((len(plan.seq_ids), 1 + 2 * most), -1, dtype=np.int64)
        for index, draft in drafts.items():
            count = len(draft.token_ids)
            table[index, 0] = count
            table[index, 1 : 1 + count] = draft.token_ids
            table[index, 1 + most : 1 + most + count] = draft.parent_indices
        table = self._broadcast(table)
        if self._answers:
            return drafts
        shared = {}
        for index, row in enumerate(table):
            count = int(row[0])
            if count > 0:
                parents = row[1 + most : 1 + most + count].tolist()
                shared[index] = Draft(row[1 : 1 + count].tolist(), parents)
        return shared

    def _broadcast(self, table: np.ndarray) -> np.ndarray:
        if self._communicator.size == 1:
            return table
        shared = self._communicator.broadcast(on_device(table, self._device), ANSWERING_TENSOR_RANK)
        return shared.cpu().numpy()


def _place_tree(inputs: StepInputs, index: int, draft: Draft) -> None:
    """Depths as positions, and a mask, for the request at one batch index, whose last query tokens are `draft`."""
    start, end = int(inputs.query_start[index]), int(inputs.query_start[index + 1])
    known = end - start - len(draft.token_ids)
    mask = np.tril(np.ones((end - start, end - start), dtype=bool))
    mask[known:, known:] = False
    root = int(inputs.positions[start + known - 1])
    for node, parent in enumerate(draft.parent_indices):
        if parent >= 0:
            mask[known + node] = mask[known + parent]
        mask[known + node, known + node] = True
    inputs.positions[start + known : end] = root + np.asarray(draft.depths)
    inputs.tree_masks[index] = mask
