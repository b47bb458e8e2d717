"""Speculation in the runner: drafts are verified in the step after the one that proposed them.

The rank that answers drafts and judges, and sends the other ranks one small tensor of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dovetail.config.resolved import ResolvedConfig, ResolvedDrafter, ResolvedSpeculation
from dovetail.contracts.attention import AttentionModule
from dovetail.contracts.executor import ANSWERING_TENSOR_RANK
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.model import CausalLM, ModelContext
from dovetail.contracts.speculation import AcceptanceRule, Draft
from dovetail.contracts.step import DraftCounts, StepPlan
from dovetail.registry.bootstrap import LoadedPlugins
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.input_batch import StepInputs
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.draft_lengths import DraftLengths, LengthSetting
from dovetail.worker.speculation.drafters import LoadedDrafter
from dovetail.worker.speculation.drafting import Drafting
from dovetail.worker.speculation.verifier import DraftedRequest, Verifier, first_nodes
from dovetail.worker.speculation.waiting_states import WaitingStates


def create_speculation(
    config: ResolvedConfig,
    plugins: LoadedPlugins,
    drafters: Mapping[str, LoadedDrafter],
    model: CausalLM,
    context: ModelContext,
    layout: KVLayout,
    answers: bool,
) -> Speculation | None:
    """The drafters that were loaded and the rule of a config; None where it has no speculative section. `answers`:
    whether this rank drafts and judges."""
    if config.speculation is None:
        return None
    rule = create_rule(config.speculation, plugins, context)
    layers = [
        (group.group_id, context.attention_layers[layer_id]) for group in layout.groups for layer_id in group.layer_ids
    ]
    settings = {name: _length_setting(drafter, plugins) for name, drafter in config.speculation.drafters.items()}
    lengths = DraftLengths(
        settings, strict=config.is_strict, disable_by_batch_size=config.speculation.disable_by_batch_size
    )
    waiting = {name: WaitingStates(layout.block_size) for name, setting in settings.items() if not setting.stateless}
    drafting = Drafting(drafters, settings, lengths, waiting, config.model.max_model_len, context.device)
    return Speculation(drafting, rule, model, context, layers, answers)


def create_rule(config: ResolvedSpeculation, plugins: LoadedPlugins, context: ModelContext) -> AcceptanceRule:
    """A fresh instance of the acceptance rule."""
    rule: AcceptanceRule = plugins.create(config.acceptance)
    rule.use_operators(context.operators)
    return rule


def _length_setting(chosen: ResolvedDrafter, plugins: LoadedPlugins) -> LengthSetting:
    plugin, options = plugins.get(chosen.component)
    can = plugin.capabilities
    return LengthSetting(
        num_tokens=chosen.num_tokens,
        length=chosen.length,
        min_confidence=chosen.min_confidence,
        stateless=can.stateless,
        kv_cache=can.kv_cache,
        trees=can.trees and plugin.proposes_trees(options),
        draws=can.probabilities,
    )


class Speculation:
    """Verifies the drafts of one step and lets those of the next be proposed."""

    def __init__(
        self,
        drafting: Drafting,
        rule: AcceptanceRule,
        model: CausalLM,
        context: ModelContext,
        layers: Sequence[tuple[int, AttentionModule]],
        answers: bool,
    ):
        self.drafting = drafting
        """What is kept of requests, and whose guesses are verified."""
        self._rule = rule
        self._model = model
        self._communicator = context.communicator
        self._layers = layers
        self._answers = answers
        self._device = context.device

    def verify(self, step: ComputedStep, sampler: Sampler) -> None:
        """Judges the drafts that this step computed; accepted ones and the token after them go to `step.tokens`."""
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
            end = int(inputs.query_start[place + 1])
            rows += range(end - count - 1, end)
        wanted = hidden if len(rows) == len(hidden) else hidden[torch.tensor(rows, device=self._device)]
        logits = self._model.compute_logits(wanted)
        verdicts = self._judge(logits, requests, places, sampler, step)
        for place, request, (nodes, token) in zip(places, requests, verdicts, strict=True):
            self._commit(place, request, nodes, token, step)

    def propose(self, step: ComputedStep, sampler: Sampler) -> dict[int, int]:
        """Drafts for the next step: how many wait, by place in the plan. Errors of drafters go to `step.tokens`."""
        drafts: dict[int, Draft] = {}
        if self._answers:
            drafts = self.drafting.propose(step, sampler)
        self.drafting.end_step()
        drafts = self._share_drafts(drafts, step.plan)
        for place, key in enumerate(step.plan.keys):
            step.batch.set_draft(key, drafts.get(place))
        return {place: len(draft.token_ids) for place, draft in drafts.items()}

    def _judge(
        self,
        logits: torch.Tensor,
        requests: list[DraftedRequest],
        places: list[int],
        sampler: Sampler,
        step: ComputedStep,
    ) -> list[tuple[list[int], int]]:
        """Accepted nodes and the next token of each request, -1 for requests that failed; the same on every rank."""
        table = np.full((len(requests), self.drafting.max_drafts + 2), -1, dtype=np.int64)
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
        drafted = len(request.draft.token_ids)
        drafter = self.drafting.judged(request.key, drafted, nodes)
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
        most = self.drafting.max_drafts
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
