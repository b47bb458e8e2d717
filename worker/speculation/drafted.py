"""Speculation in the runner: drafts are verified in the step after the one that proposed them.

The rank that answers drafts and judges, and sends the other ranks one small tensor of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dovetail.config.resolved import ResolvedConfig, ResolvedDrafter, ResolvedSpeculation
from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.draft_length import DrafterFacts
from dovetail.contracts.executor import ANSWERING_TENSOR_RANK
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.model import CausalLM, ModelContext
from dovetail.contracts.speculation import AcceptanceRule, Draft
from dovetail.contracts.step import DraftCounts, StepPlan
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.input_batch import InputBatch, StepInputs
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.drafters import LoadedDrafter
from dovetail.worker.speculation.drafting import Drafting
from dovetail.worker.speculation.lengths import create_lengths
from dovetail.worker.speculation.speculation import Speculation
from dovetail.worker.speculation.verifier import DraftedRequest, Verifier, first_nodes
from dovetail.worker.speculation.waiting_states import WaitingStates


def create_speculation(
    config: ResolvedConfig,
    plugins: LoadedPlugins,
    drafters: Mapping[str, LoadedDrafter],
    model: CausalLM,
    context: ModelContext,
    layout: KVLayout,
    batch: InputBatch,
    answers: bool,
) -> Speculation:
    """The drafters that were loaded, and the rule, of a config with speculation. `answers`: whether this rank drafts
    and judges."""
    assert config.speculation is not None
    rule = create_rule(config.speculation, plugins, context)
    layers = [
        (group.group_id, context.attention_layers[layer_id]) for group in layout.groups for layer_id in group.layer_ids
    ]
    section = config.speculation
    facts = {name: _facts(section.drafters[name], plugins) for name in drafters}
    lengths = create_lengths(section.drafters if drafters else {}, facts, plugins, section.disable_by_batch_size)
    waiting = {name: WaitingStates(layout.block_size) for name, one in facts.items() if not one.stateless}
    drafting = Drafting(
        drafters, facts, lengths, waiting, config.model.max_model_len, context.device, strict=config.is_strict
    )
    max_drafts = max(drafter.num_tokens for drafter in section.drafters.values())
    return DraftedSpeculation(drafting, rule, model, context, layers, batch, max_drafts, answers)


def create_rule(config: ResolvedSpeculation, plugins: LoadedPlugins, context: ModelContext) -> AcceptanceRule:
    """A fresh instance of the acceptance rule."""
    rule: AcceptanceRule = plugins.create(config.acceptance)
    rule.use_operators(context.operators)
    return rule


def _facts(chosen: ResolvedDrafter, plugins: LoadedPlugins) -> DrafterFacts:
    plugin, _ = plugins.get(chosen.component)
    return DrafterFacts(
        num_tokens=chosen.num_tokens,
        stateless=plugin.capabilities.stateless,
        keeps_layers=chosen.kv_cache,
        trees=chosen.trees,
    )


class DraftedSpeculation(Speculation):
    """Verifies the drafts of one step and lets those of the next be proposed."""

    lets_steps_overlap = False

    def __init__(
        self,
        drafting: Drafting,
        rule: AcceptanceRule,
        model: CausalLM,
        context: ModelContext,
        layers: Sequence[tuple[int, AttentionModule]],
        batch: InputBatch,
        max_drafts: int,
        answers: bool,
    ):
        self._drafting = drafting
        self._batch = batch
        self.max_drafts = max_drafts
        self.hidden_layers = drafting.hidden_layers
        self._rule = rule
        self._model = model
        self._communicator = context.communicator
        self._layers = layers
        self._answers = answers
        self._device = context.device

    def begin(self, plan: StepPlan) -> None:
        """As `Speculation.begin`."""
        for key in plan.finished:
            self._drafting.finish(key, self._batch)
        for key in plan.preempted:
            self._drafting.pause(key, self._batch)
        for request in plan.new_requests:
            self._drafting.add(request)

    def finish_all(self) -> None:
        """As `Speculation.finish_all`."""
        self._drafting.finish_all(self._batch)

    def forget_finished(self) -> None:
        """As `Speculation.forget_finished`."""
        # Plans tell of ends with the next step: too late, its answer would be learned then.
        self._drafting.finish_all(self._batch)
        self._drafting.forget_finished()

    def verify(self, step: ComputedStep, sampler: Sampler) -> None:
        """As `Speculation.verify`."""
        if step.plan.num_drafts is None:
            return
        plan, inputs, batch, hidden = step.plan, step.inputs, step.batch, step.hidden
        places = [int(place) for place in np.flatnonzero(inputs.reaches_end & (inputs.num_drafts > 0))]
        if not places:
            return
        requests: list[DraftedRequest] = []
        rows: list[int] = []
        for place in places:
            entry = batch.requests[plan.keys[place]]
            count = int(inputs.num_drafts[place])
            assert entry.draft is not None
            draft = first_nodes(entry.draft, count)
            requests.append(DraftedRequest(plan.keys[place], int(batch.num_tokens[entry.row]), draft))
            if self._answers:
                self._drafting.computed(plan.keys[place], count)
            end = int(inputs.query_start[place + 1])
            rows += range(end - count - 1, end)
        wanted = hidden if len(rows) == len(hidden) else hidden[torch.tensor(rows, device=self._device)]
        logits = self._model.compute_logits(wanted)
        verdicts = self._judge(logits, requests, places, sampler, step)
        for place, request, (nodes, token) in zip(places, requests, verdicts, strict=True):
            self._commit(place, request, nodes, token, step)

    def propose(self, step: ComputedStep, sampler: Sampler, seconds: float) -> None:
        """As `Speculation.propose`."""
        drafts: dict[int, Draft] = {}
        num_requests = len(step.plan.keys)
        if self._answers:
            num_known = step.inputs.query_start[-1] - step.inputs.num_drafts.sum()
            drafts = self._drafting.propose(step, sampler, seconds if num_known == num_requests else None)
            step.tokens.idle_drafters = self._drafting.idle_drafters(num_requests)
        drafts = self._share_drafts(drafts, step.plan)
        for place, key in enumerate(step.plan.keys):
            step.batch.set_draft(key, drafts.get(place))
        step.tokens.num_next_drafts = {place: len(draft.token_ids) for place, draft in drafts.items()}

    def _judge(
        self,
        logits: torch.Tensor,
        requests: list[DraftedRequest],
        places: list[int],
        sampler: Sampler,
        step: ComputedStep,
    ) -> list[tuple[list[int], int]]:
        """Accepted nodes and the next token of each request, -1 for requests that failed; the same on every rank."""
        table = np.full((len(requests), self.max_drafts + 2), -1, dtype=np.int64)
        if self._answers:
            output = Verifier(self._rule, sampler).verify(logits, requests)
            for index, place in enumerate(places):
                if index in output.faults:
                    step.tokens.drafter_errors[place] = output.faults[index]
                if index in output.failed:
                    step.tokens.failed[place] = output.failed[index]
                    continue
                nodes = output.accepted[index]
                table[index, 0] = output.token_ids[index][-1]
                table[index, 1] = len(nodes)
                table[index, 2 : 2 + len(nodes)] = nodes
                if index in output.logprobs:
                    step.tokens.logprobs[place] = output.logprobs[index]
        table = self._broadcast(table)
        return [(row[2 : 2 + max(row[1], 0)].tolist(), int(row[0])) for row in table]

    def _commit(
        self,
        place: int,
        request: DraftedRequest,
        nodes: list[int],
        token: int,
        step: ComputedStep,
    ) -> None:
        entry = step.batch.requests[request.key]
        if token < 0:
            return
        if nodes != list(range(len(nodes))):
            self._compact(place, request, nodes, step.inputs)
        # What is computed and stands: the known tokens and the accepted drafts.
        step.batch.num_computed[entry.row] = request.position + len(nodes)
        tokens = [request.draft.token_ids[node] for node in nodes] + [token]
        step.batch.extend(entry.row, tokens)
        step.tokens.put(place, tokens)
        if not self._answers:
            return
        drafted = len(request.draft.token_ids)
        drafter = self._drafting.judged(request.key, drafted, nodes)
        depth = max(request.draft.depths, default=0)
        step.tokens.draft_counts[place] = DraftCounts(drafted, len(nodes), drafter, depth)

    def _compact(self, place: int, request: DraftedRequest, nodes: list[int], inputs: StepInputs) -> None:
        """Moves the KV of an accepted path through a tree to the slots right behind the known tokens."""
        first = int(inputs.query_start[place + 1]) - len(request.draft.token_ids)
        for group_id, layer in self._layers:
            slots = inputs.slot_mappings[group_id]
            source = torch.from_numpy(slots[[first + node for node in nodes]]).to(self._device)
            target = torch.from_numpy(slots[first : first + len(nodes)].copy()).to(self._device)
            layer.move_slots(source, target)

    def _share_drafts(self, drafts: dict[int, Draft], plan: StepPlan) -> dict[int, Draft]:
        """The same drafts on every rank; probabilities stay where they are used."""
        if self._communicator.size == 1:
            return drafts
        most = self.max_drafts
        table = np.full((len(plan.keys), 1 + 2 * most), -1, dtype=np.int64)
        for place, draft in drafts.items():
            count = len(draft.token_ids)
            table[place, 0] = count
            table[place, 1 : 1 + count] = draft.token_ids
            table[place, 1 + most : 1 + most + count] = draft.parent_indices
        table = self._broadcast(table)
        if self._answers:
            return drafts
        shared = {}
        for place, row in enumerate(table):
            count = int(row[0])
            if count > 0:
                parents = row[1 + most : 1 + most + count].tolist()
                shared[place] = Draft(row[1 : 1 + count].tolist(), parents)
        return shared

    def _broadcast(self, table: np.ndarray) -> np.ndarray:
        if self._communicator.size == 1:
            return table
        on_device = torch.from_numpy(table).to(self._device)
        return self._communicator.broadcast(on_device, ANSWERING_TENSOR_RANK).cpu().numpy()
