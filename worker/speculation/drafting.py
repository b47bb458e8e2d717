"""Drafting in the runner: what each drafter is shown of a step, and what it guesses for the next one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.contracts.draft_length import DrafterCall, DrafterFacts
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft, DraftBatch, DraftRequest, LearnsFromRequests
from dovetail.contracts.step import NewRequest, StepPlan
from dovetail.nn.host_copies import on_device
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.input_batch import InputBatch, StepInputs
from dovetail.worker.sampling.grammar_masks import GrammarMasks
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.checked import checked_draft
from dovetail.worker.speculation.draft_grammar import cut_to_grammar, put_in_front
from dovetail.worker.speculation.draft_sampling import draft_uniforms
from dovetail.worker.speculation.drafters import LoadedDrafter, wanted_layers
from dovetail.worker.speculation.late_reading import LateReading, read_soonest
from dovetail.worker.speculation.lengths import LengthFault, Lengths, Offer
from dovetail.worker.speculation.top_tokens import RowsOfRequest, TopTokenRecords
from dovetail.worker.speculation.verifier import first_nodes
from dovetail.worker.speculation.waiting_states import Span, States, WaitingStates

logger = logging.getLogger(__name__)

FORCED = "forced_tokens"
"""What counts (`DraftCounts.drafter`) name drafts that a grammar forced in the place of a drafter's own."""


@dataclass(slots=True)
class DraftedFor:
    """What is kept of a request from the first step to its end, through preemptions."""

    drafter: str
    max_total_tokens: int
    """Where max_tokens or max_model_len ends the request."""
    sampling: SamplingParams
    """As its drafter is shown it: greedy where drafts must not be drawn."""
    prediction: np.ndarray | None = None
    """int32, read-only: what the request expects its output to be."""
    is_on: bool = True
    """False once its drafter failed it."""
    token_ids: Sequence[int] = ()
    """Known tokens of a request that is out of the batch."""


@dataclass(frozen=True, slots=True)
class JudgedDraft:
    """What became of a draft, as `DraftWorker.on_verified` has it."""

    accepted: list[int]
    """Nodes from the root down."""
    num_drafted: int
    """Nodes that were verified."""


class Drafting:
    """The drafters of an engine, and the requests that have one. Ranks that do not draft know neither."""

    def __init__(
        self,
        drafters: Mapping[str, LoadedDrafter],
        facts: Mapping[str, DrafterFacts],
        lengths: Lengths,
        waiting: Mapping[str, WaitingStates],
        late: Mapping[str, LateReading],
        top_tokens: TopTokenRecords,
        max_model_len: int,
        most_read: int,
        device: torch.device,
        *,
        strict: bool,
    ):
        """`most_read`: positions that a drafter which reads late reads after one step."""
        self._drafters = dict(drafters)
        self._facts = dict(facts)
        """Of the drafters of this rank."""
        self._waiting = dict(waiting)
        """Of the drafters that are to see every state."""
        self._late = dict(late)
        """Of the drafters that read late."""
        self._top_tokens = top_tokens
        self._max_model_len = max_model_len
        self._most_read = most_read
        self._device = device
        self._excessive: set[str] = set()
        """Drafters that gave more than anybody asks for, of which a warning was logged."""
        self._lengths = lengths
        self._strict = strict
        self.hidden_layers = wanted_layers(self._drafters)
        """States between the target's layers that some drafter wants; none on ranks that do not draft."""
        self._requests: dict[int, DraftedFor] = {}
        """By seq_id, those that have or had a drafter."""
        self._judged: dict[int, JudgedDraft] = {}
        """By seq_id, what became of the draft that was just verified."""
        self._forced: set[int] = set()
        """seq_ids whose waiting drafts are forced tokens in the place of their drafter's."""

    def add(self, request: NewRequest) -> None:
        """A request comes, or comes back; a drafter that failed it before stays off."""
        known = self._requests.get(request.seq_id)
        if known is not None:
            known.is_on = known.is_on and request.drafter is not None
            known.token_ids = ()
        elif request.drafter in self._facts:
            limit = self._max_model_len
            if request.sampling.max_tokens is not None:
                limit = min(limit, request.num_prompt_tokens + request.sampling.max_tokens)
            sampling = self._shown_sampling(request.drafter, request.sampling)
            self._requests[request.seq_id] = DraftedFor(request.drafter, limit, sampling, _prediction(request))

    def _shown_sampling(self, drafter: str, sampling: SamplingParams) -> SamplingParams:
        """With drafts that were drawn another number of them gives other tokens of the same distribution. A seed
        promises the same tokens, so where the clock decides how many there are, they are not drawn: a best guess is
        accepted if it is the token that comes anyway."""
        draws = self._drafters[drafter].config.abilities.probabilities
        promises = sampling.seed is not None or self._strict
        if not (draws and promises and self._lengths.adapts(drafter)):
            return sampling
        # This is one completion of the `n`; several greedy ones are refused.
        return replace(sampling, temperature=0.0, n=1, best_of=None)

    def blocks_moved(self, plan: StepPlan) -> None:
        """A plan swaps and copies blocks."""
        for late in self._late.values():
            late.blocks_moved(plan)

    def judged(self, seq_id: int, drafted: int, nodes: list[int]) -> str:
        """Of `drafted` nodes those of `nodes` were accepted. Returns the drafter's name, or `FORCED`."""
        drafter = self._requests[seq_id].drafter
        self._judged[seq_id] = JudgedDraft(nodes, drafted)
        if seq_id in self._forced:
            return FORCED
        self._lengths.judged(seq_id, drafter, drafted, nodes)
        return drafter

    def computed(self, seq_id: int, num_drafts: int) -> None:
        """The step that runs computed drafts of a request."""
        if seq_id not in self._forced:
            self._lengths.computed(self._requests[seq_id].drafter, num_drafts)

    @property
    def reads_logits(self) -> bool:
        """Whether some drafter reads what `note_logits` notes."""
        return bool(self._top_tokens.drafters)

    def note_logits(
        self, logits: torch.Tensor, follows: np.ndarray, seq_ids: Sequence[int], parents: Sequence[Sequence[int]]
    ) -> None:
        """The target's logits after rows of `seq_ids`: [M, vocab_size], the rows of each request one behind the other.
        `follows`: the input of each row. `parents`: of each request, as `TopTokens.parents`."""
        rows, start = [], 0
        for seq_id, own in zip(seq_ids, parents, strict=True):
            request = self._requests.get(seq_id)
            if request is not None and request.is_on and request.drafter in self._top_tokens.drafters:
                rows.append(RowsOfRequest(seq_id, request.drafter, start, own))
            start += len(own)
        self._top_tokens.note(logits, follows, rows)

    def propose(
        self, step: ComputedStep, sampler: Sampler, seconds: float | None, errors: dict[int, str]
    ) -> dict[int, Draft]:
        """What all drafters guess for the next step, by batch index.

        Args:
            seconds: what the step cost so far; None where it computed parts of prompts.
            errors: by batch index, why requests go on without a drafter: those that drafts failed to be judged for, to
                which those of the drafters are added.
        """
        self._lengths.end_step(len(step.plan.seq_ids), seconds)
        for late in self._late.values():
            late.computed(step.inputs)
        drafts: dict[int, Draft] = {}
        seq_ids = step.plan.seq_ids
        self._switch_off(seq_ids, errors)
        indices: dict[str, list[int]] = {}
        for index, seq_id in enumerate(seq_ids):
            request = self._requests.get(seq_id)
            if request is not None and request.is_on:
                indices.setdefault(request.drafter, []).append(index)
        for name, chosen in indices.items():
            started = time.perf_counter()
            states = self._states(name, step.hidden, step.layer_states)
            requests = self._draft_requests(name, chosen, step, sampler, states, errors)
            if requests:
                drafts |= self._draft(name, requests, states, step, sampler.vocab_size, errors, started)
        if sampler.grammars.wants(seq_ids):
            cut = {index: cut_to_grammar(draft, seq_ids[index], sampler.grammars) for index, draft in drafts.items()}
            drafts = {index: draft for index, draft in cut.items() if draft.token_ids}
        self._switch_off(seq_ids, errors)
        # What was judged in this step is known to whom it concerns.
        self._judged.clear()
        self._forced.difference_update(seq_ids)
        kept = self._kept(step, drafts, errors)
        if sampler.grammars.wants(seq_ids):
            self._put_forced_in_front(step, sampler.grammars, kept)
        return kept

    def _kept(self, step: ComputedStep, drafts: Mapping[int, Draft], errors: dict[int, str]) -> dict[int, Draft]:
        """The part of each draft that is worth verifying."""
        seq_ids = step.plan.seq_ids
        offers = {}
        for index, draft in drafts.items():
            num_known = int(step.batch.num_tokens[step.inputs.rows[index]])
            offers[index] = Offer(seq_ids[index], self._requests[seq_ids[index]].drafter, draft, num_known)
        counts, faults = self._lengths.keep(offers, len(seq_ids))
        errors |= faults
        self._switch_off(seq_ids, faults)
        return {index: first_nodes(drafts[index], count) for index, count in counts.items() if count}

    def _put_forced_in_front(self, step: ComputedStep, grammars: GrammarMasks, drafts: dict[int, Draft]) -> None:
        """Changes `drafts` where grammars force tokens that they do not begin with."""
        seq_ids = step.plan.seq_ids
        if not self._lengths.allow_drafts(len(seq_ids)):
            return
        for index, seq_id in enumerate(seq_ids):
            request = self._requests.get(seq_id)
            if request is None or not request.is_on or not step.counts[index]:
                continue
            forced = self._forced_tokens(seq_id, int(step.batch.num_tokens[step.inputs.rows[index]]), grammars)
            draft = put_in_front(drafts.get(index), forced)
            if draft is not None and draft is not drafts.get(index):
                drafts[index] = draft
                self._forced.add(seq_id)

    def _forced_tokens(self, seq_id: int, num_known: int, grammars: GrammarMasks) -> tuple[int, ...]:
        """Those that a step can verify."""
        request = self._requests[seq_id]
        most = min(request.max_total_tokens - num_known - 1, self._facts[request.drafter].num_tokens)
        return grammars.forced(seq_id)[: max(0, most)]

    def idle_drafters(self, num_requests: int) -> frozenset[str]:
        """Drafters with layers of their own that new requests should go without at this batch size."""
        idle = self._lengths.idle_drafters(num_requests)
        return frozenset(name for name in idle if self._facts[name].keeps_layers)

    def pause(self, seq_id: int, batch: InputBatch) -> None:
        """A request leaves the batch to come back; what is known of it is kept for its drafter."""
        self._forced.discard(seq_id)
        request = self._requests.get(seq_id)
        if request is not None and seq_id in batch.requests:
            request.token_ids = batch.known_tokens(seq_id).tolist()

    def finish(self, seq_id: int, batch: InputBatch) -> None:
        """Tells the request's drafter that it ended, in the batch or out of it."""
        request = self._requests.pop(seq_id, None)
        self._forced.discard(seq_id)
        self._lengths.forget(seq_id)
        self._top_tokens.forget(seq_id)
        if request is not None and request.drafter in self._waiting:
            self._waiting[request.drafter].forget(seq_id)
        if request is None or request.drafter not in self._drafters:
            return
        token_ids = batch.known_tokens(seq_id).tolist() if seq_id in batch.requests else request.token_ids
        for name in (request.drafter, *self._drafters[request.drafter].config.stages):
            try:
                self._drafters[name].worker.on_finished(seq_id, token_ids)
            except Exception:
                logger.exception("drafter %r raised in on_finished", name)

    def finish_all(self, batch: InputBatch) -> None:
        """Every request that is known here has ended."""
        for seq_id in list(self._requests):
            self.finish(seq_id, batch)

    def forget_finished(self) -> None:
        """Drafters forget what requests that ended taught them."""
        for drafter in self._drafters.values():
            if isinstance(drafter.worker, LearnsFromRequests):
                drafter.worker.forget_finished()

    def _switch_off(self, seq_ids: Sequence[int], errors: Mapping[int, str]) -> None:
        for index in errors:
            request = self._requests[seq_ids[index]]
            request.is_on = False
            self._top_tokens.forget(seq_ids[index])
            if request.drafter in self._waiting:
                self._waiting[request.drafter].forget(seq_ids[index])

    def _states(self, name: str, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> States:
        """The target's last states and those between its layers, as far as a drafter wants them."""
        drafter = self._drafters[name]
        last = hidden if drafter.config.abilities.needs_hidden_states else None
        layers = drafter.config.hidden_layers
        if layer_states is None or not layers:
            return last, None
        if layers == self.hidden_layers:
            return last, layer_states
        parts = layer_states.view(len(layer_states), len(self.hidden_layers), -1)
        indices = np.array([self.hidden_layers.index(layer) for layer in layers], dtype=np.int64)
        index = on_device(indices, self._device)
        return last, parts.index_select(1, index).flatten(1)

    def _draft(
        self,
        name: str,
        requests: dict[int, DraftRequest],
        states: States,
        step: ComputedStep,
        vocab_size: int,
        errors: dict[int, str],
        started: float,
    ) -> dict[int, Draft]:
        """One drafter's guesses for its requests, by batch index. A drafter that raises, or guesses what cannot be,
        loses them. `started`: when it was first asked what to draft; what that takes is a part of what drafting costs.
        """
        worker = self._drafters[name].worker
        num_steps = 1
        if name in self._waiting:
            num_steps += self._waiting[name].num_steps
            states = self._waiting[name].join_states(states, [request.seq_id for request in requests.values()])
        try:
            for request in requests.values():
                judged = self._judged.get(request.seq_id)
                if judged is not None and request.seq_id not in self._forced:
                    worker.on_verified(request.seq_id, judged.accepted, judged.num_drafted)
            proposed = list(self._drafters[name].propose(DraftBatch(list(requests.values()), *states)))
            if len(proposed) != len(requests):
                raise ValueError(f"{len(proposed)} drafts for {len(requests)} requests")
        except Exception as error:
            logger.warning("drafter %s raised; its requests go on without it", type(worker).__name__, exc_info=True)
            errors |= dict.fromkeys(requests, f"{type(worker).__name__} raised {type(error).__name__}: {error}")
            return {}
        seconds = time.perf_counter() - started
        asked = [request.max_drafts for request in requests.values()]
        drafts, given = self._checked(name, requests, proposed, vocab_size, errors)
        # Parts of prompts are no part of what drafting costs; what was put off belongs to the steps that put it off.
        most_rows = len(requests) * (num_steps + self._facts[name].num_tokens)
        is_decode = sum(len(request.hidden_rows) for request in requests.values()) <= most_rows
        num_late = self._note_read(name, requests, step)
        self._lengths.called(
            DrafterCall(
                drafter=name,
                seq_ids=[request.seq_id for request in requests.values()],
                asked=asked,
                given=given,
                seconds=(seconds if any(asked) else seconds / num_steps) if is_decode and not num_late else None,
                num_late=num_late,
                late_seconds=seconds if num_late else None,
            )
        )
        return drafts

    def _note_read(self, name: str, requests: Mapping[int, DraftRequest], step: ComputedStep) -> int:
        """A drafter has read the positions of `requests`. Returns how many of them had been put off."""
        late, num_late = self._late.get(name), 0
        if late is None:
            return 0
        for index, request in requests.items():
            first, count = request.first_position, len(request.hidden_rows)
            late.read(int(step.inputs.rows[index]), first, first + count)
            num_late += min(count, max(0, int(step.inputs.positions[step.inputs.query_start[index]]) - first))
        return num_late

    def _checked(
        self,
        name: str,
        requests: dict[int, DraftRequest],
        proposed: Sequence[Draft | None],
        vocab_size: int,
        errors: dict[int, str],
    ) -> tuple[dict[int, Draft], list[int | None]]:
        """What can be used of a drafter's answers, by batch index; and how many tokens each holds, None for those that
        cannot be used."""
        drafts: dict[int, Draft] = {}
        sizes: list[int | None] = []
        trees = self._facts[name].trees
        for (index, request), answer in zip(requests.items(), proposed, strict=True):
            try:
                draft = Draft([]) if answer is None else checked_draft(answer, vocab_size, self._device, trees=trees)
            except Exception as error:  # a sequence of the plugin's own may raise anything
                worker = type(self._drafters[name].worker).__name__
                errors[index] = f"{worker} proposed a draft that cannot be: {error}"
                logger.warning("request %d goes on without its drafter: %s", request.seq_id, errors[index])
                sizes.append(None)
                continue
            given = len(draft.token_ids)
            sizes.append(given)
            self._warn_of_excess(name, given)
            if given and request.max_drafts:
                if draft.probs is not None and request.sampling.is_greedy:
                    draft = replace(draft, probs=None)  # no draws, however certain their distributions are
                drafts[index] = first_nodes(draft, request.max_drafts)
        return drafts, sizes

    def _warn_of_excess(self, name: str, given: int) -> None:
        """Cutting a draft is part of the contract, but what no request ever asks for is computed for nothing."""
        most = self._facts[name].num_tokens
        if given > most and name not in self._excessive:
            self._excessive.add(name)
            worker = type(self._drafters[name].worker).__name__
            logger.warning(
                "drafter %r (%s) gave %d guesses, num_tokens is %d: the rest is cut", name, worker, given, most
            )

    def _draft_requests(
        self,
        name: str,
        indices: list[int],
        step: ComputedStep,
        sampler: Sampler,
        states: States,
        errors: dict[int, str],
    ) -> dict[int, DraftRequest]:
        """What one drafter is shown, by batch index: all its requests, or of one that is stateless or reads late those
        that want drafts. Nothing while it can wait, see `WaitingStates`."""
        facts, inputs, batch = self._facts[name], step.inputs, step.batch
        seq_ids = [step.plan.seq_ids[index] for index in indices]
        unread, behind = self._unread(name, indices, step)
        known = batch.num_tokens[inputs.rows[indices]].astype(np.int64)
        most = self._most_drafts(facts, seq_ids, indices, known, step)
        try:
            wanted = self._lengths.ask(name, seq_ids, most, batch.known_tokens, len(step.plan.seq_ids), behind)
        except LengthFault as fault:
            errors |= dict.fromkeys(indices, str(fault))
            return {}
        if facts.stateless or facts.reads_late:
            chosen = np.flatnonzero(wanted).tolist()
            indices, seq_ids = [indices[i] for i in chosen], [seq_ids[i] for i in chosen]
            known, wanted = known[chosen], wanted[chosen]
            unread = [unread[i] for i in chosen] if facts.reads_late else []
        elif not wanted.any() and self._can_wait(name, seq_ids, indices, step, states):
            return {}
        if not indices:
            return {}
        if facts.reads_late:
            read = read_soonest(unread, self._most_read)
            wanted *= [now.stop == whole.stop for now, whole in zip(read, unread, strict=True)]
            shown = [Span(now.start, np.arange(len(now))) for now in read]
        else:
            shown = self._states_shown(name, seq_ids, indices, inputs)
        uniforms = draft_uniforms(sampler, seq_ids, known, int(wanted.max()))
        grammars = sampler.grammars if sampler.grammars.wants(seq_ids) else None
        return {
            index: self._draft_request(seq_id, shown[i], uniforms[i, :count], batch, grammars)
            for i, (index, seq_id, count) in enumerate(zip(indices, seq_ids, wanted.tolist(), strict=True))
            if len(shown[i].rows)
        }

    def _most_drafts(
        self, facts: DrafterFacts, seq_ids: list[int], indices: list[int], known: NDArray[np.int64], step: ComputedStep
    ) -> NDArray[np.int64]:
        """int64, by request: how many drafts it could use. `known`: how many tokens it has."""
        limits = np.array([self._requests[seq_id].max_total_tokens for seq_id in seq_ids])
        # A round yields at least one token, so the last one that fits is never a draft.
        most: NDArray[np.int64] = np.clip(limits - known - 1, 0, facts.num_tokens) * (step.counts[indices] > 0)
        if facts.reads_late:  # a first token does not wait until the drafter has read the prompt
            prompts = [step.batch.requests[seq_id].request.num_prompt_tokens for seq_id in seq_ids]
            most *= np.array(_starts(step.inputs, indices)) >= np.array(prompts)
        return most

    def _draft_request(
        self,
        seq_id: int,
        shown: Span,
        uniforms: NDArray[np.float64],
        batch: InputBatch,
        grammars: GrammarMasks | None,
    ) -> DraftRequest:
        """`uniforms`: one for each draft that is wanted."""
        request, count = self._requests[seq_id], len(uniforms)
        return DraftRequest(
            seq_id=seq_id,
            token_ids=batch.known_tokens(seq_id),
            num_prompt_tokens=batch.requests[seq_id].request.num_prompt_tokens,
            max_drafts=count,
            sampling=request.sampling,
            hidden_rows=shown.rows,
            uniforms=uniforms,
            forced=() if grammars is None else grammars.forced(seq_id)[:count],
            first_position=shown.first_position,
            prediction=request.prediction,
            top_tokens=self._top_tokens.take(seq_id),
        )

    def _states_shown(self, name: str, seq_ids: list[int], indices: list[int], inputs: StepInputs) -> list[Span]:
        """By request, what a drafter is to read."""
        accepted_rows = self._accepted_rows(seq_ids, indices, inputs)
        spans = [Span(*pair) for pair in zip(_starts(inputs, indices), accepted_rows, strict=True)]
        waiting = self._waiting.get(name)
        if waiting is None:
            return spans
        return [waiting.join(seq_id, span) for seq_id, span in zip(seq_ids, spans, strict=True)]

    def _unread(self, name: str, indices: list[int], step: ComputedStep) -> tuple[list[range], list[int]]:
        """By request, the computed positions that a drafter which reads late has not read, and how many of them are
        those of earlier steps; nothing for other drafters."""
        late = self._late.get(name)
        if late is None:
            return [], []
        rows = step.inputs.rows[indices].tolist()
        ends = step.batch.num_computed[rows].tolist()
        unread = [range(late.first_unread(row, end), end) for row, end in zip(rows, ends, strict=True)]
        starts = _starts(step.inputs, indices)
        return unread, [max(0, start - span.start) for span, start in zip(unread, starts, strict=True)]

    def _can_wait(self, name: str, seq_ids: list[int], indices: list[int], step: ComputedStep, states: States) -> bool:
        """Whether a drafter can see later what this step computed; its states are kept then."""
        bounds = step.inputs.query_start.tolist()
        is_decode = all(bounds[index + 1] - bounds[index] == 1 and step.counts[index] for index in indices)
        if not is_decode:  # a request of which drafts were verified has more rows than one
            return False
        rows = [bounds[index] for index in indices]
        positions: list[int] = step.inputs.positions[rows].tolist()
        waiting = self._waiting[name]
        if not waiting.may_wait(positions):
            return False
        waiting.keep(seq_ids, rows, positions, states)
        return True

    def _accepted_rows(self, seq_ids: list[int], indices: list[int], inputs: StepInputs) -> list[np.ndarray]:
        """By request, int64: the rows of this step whose tokens were kept: all but rejected drafts."""
        every = np.arange(inputs.query_start[-1], dtype=np.int64)
        ends = inputs.query_start[1:]
        starts, first_drafts = inputs.query_start[indices].tolist(), (ends - inputs.num_drafts)[indices].tolist()
        found = []
        for seq_id, start, first in zip(seq_ids, starts, first_drafts, strict=True):
            nodes = self._judged[seq_id].accepted if seq_id in self._judged else []
            if nodes and nodes[-1] >= len(nodes):
                found.append(np.concatenate([every[start:first], first + np.array(nodes)]))
            else:
                found.append(every[start : first + len(nodes)])
        return found


def _prediction(request: NewRequest) -> np.ndarray | None:
    if not request.prediction:
        return None
    prediction = np.array(request.prediction, dtype=np.int32)
    prediction.flags.writeable = False
    return prediction


def _starts(inputs: StepInputs, indices: list[int]) -> list[int]:
    """The first position of each request that the step computed."""
    starts: list[int] = inputs.positions[inputs.query_start[indices]].tolist()
    return starts
