"""Drafting in the runner: what each drafter is shown of a step, and what it guesses for the next one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dovetail.contracts.draft_length import DrafterCall, DrafterFacts
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft, DraftBatch, DraftRequest, LearnsFromRequests
from dovetail.contracts.step import NewRequest
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.input_batch import InputBatch, StepInputs
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.checked import checked_draft
from dovetail.worker.speculation.drafters import LoadedDrafter, wanted_layers
from dovetail.worker.speculation.lengths import LengthFault, Lengths, Offer
from dovetail.worker.speculation.verifier import first_nodes
from dovetail.worker.speculation.waiting_states import States, WaitingStates

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftedFor:
    """What is kept of a request from the first step to its end, through preemptions."""

    drafter: str
    max_total_tokens: int
    """Where max_tokens or max_model_len ends the request."""
    sampling: SamplingParams
    """As its drafter is shown it: greedy where drafts must not be drawn."""
    is_on: bool = True
    """False once its drafter failed it."""
    token_ids: Sequence[int] = ()
    """Known tokens of a request that is out of the batch."""


class KnownTokens(Sequence[np.ndarray]):
    """The known tokens of requests, looked up where somebody looks at them."""

    def __init__(self, batch: InputBatch, keys: Sequence[int]):
        self._batch = batch
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return self._batch.known_tokens(self._keys[index])


class Drafting:
    """The drafters of an engine, and the requests that have one. Ranks that do not draft know neither."""

    def __init__(
        self,
        drafters: Mapping[str, LoadedDrafter],
        facts: Mapping[str, DrafterFacts],
        lengths: Lengths,
        waiting: Mapping[str, WaitingStates],
        max_model_len: int,
        device: torch.device,
        *,
        strict: bool,
    ):
        self._drafters = dict(drafters)
        self._facts = dict(facts)
        """Of the drafters of this rank."""
        self._waiting = dict(waiting)
        """Of the drafters that are to see every position."""
        self._max_model_len = max_model_len
        self._device = device
        self._excessive: set[str] = set()
        """Drafters that gave more than anybody asks for, which was told."""
        self._lengths = lengths
        self._strict = strict
        self.hidden_layers = wanted_layers(self._drafters)
        """States between the target's layers that some drafter wants; none on ranks that do not draft."""
        self._requests: dict[int, DraftedFor] = {}
        """By key, those that have or had a drafter."""
        self._accepted: dict[int, tuple[list[int], int]] = {}
        """By key, what became of the draft that was just verified, for `on_verified`."""

    def add(self, request: NewRequest) -> None:
        """A request comes, or comes back; a drafter that failed it before stays off."""
        known = self._requests.get(request.key)
        if known is not None:
            known.is_on = known.is_on and request.drafter is not None
            known.token_ids = ()
        elif request.drafter in self._facts:
            limit = self._max_model_len
            if request.sampling.max_tokens is not None:
                limit = min(limit, request.num_prompt_tokens + request.sampling.max_tokens)
            sampling = self._shown_sampling(request.drafter, request.sampling)
            self._requests[request.key] = DraftedFor(request.drafter, limit, sampling)

    def _shown_sampling(self, drafter: str, sampling: SamplingParams) -> SamplingParams:
        """With drafts that were drawn another number of them gives other tokens of the same distribution. A seed
        promises the same tokens, so where the clock decides how many there are, they are not drawn: a best guess is
        accepted if it is the token that comes anyway."""
        draws = self._drafters[drafter].worker.capabilities.probabilities
        promises = sampling.seed is not None or self._strict
        return replace(sampling, temperature=0.0) if draws and promises and self._lengths.adapts(drafter) else sampling

    def judged(self, key: int, drafted: int, nodes: list[int]) -> str:
        """Of `drafted` nodes those of `nodes` stood. Returns the drafter's name."""
        drafter = self._requests[key].drafter
        self._accepted[key] = (nodes, drafted)
        self._lengths.judged(key, drafter, drafted, nodes)
        return drafter

    def computed(self, key: int, num_drafts: int) -> None:
        """The step that runs computed drafts of a request."""
        self._lengths.computed(self._requests[key].drafter, num_drafts)

    def propose(self, step: ComputedStep, sampler: Sampler, seconds: float | None) -> dict[int, Draft]:
        """What all drafters guess for the next step, by batch index. Their errors go to `step.tokens`. `seconds`: what
        the step cost so far; None where it computed parts of prompts."""
        self._lengths.end_step(len(step.plan.keys), seconds)
        drafts: dict[int, Draft] = {}
        keys, errors = step.plan.keys, step.tokens.drafter_errors
        self._switch_off(keys, errors)
        places: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            request = self._requests.get(key)
            if request is not None and request.is_on:
                places.setdefault(request.drafter, []).append(place)
        for name, chosen in places.items():
            started = time.perf_counter()
            states = self._states(name, step.hidden, step.layer_states)
            requests = self._draft_requests(name, chosen, step, sampler, states)
            if requests:
                drafts |= self._draft(name, requests, states, sampler.vocab_size, errors, started)
        self._switch_off(keys, errors)
        # What was judged in this step is known to whom it concerns.
        self._accepted.clear()
        return self._kept(step, drafts)

    def _kept(self, step: ComputedStep, drafts: Mapping[int, Draft]) -> dict[int, Draft]:
        """The part of each draft that is worth verifying."""
        keys = step.plan.keys
        offers = {}
        for place, draft in drafts.items():
            num_known = int(step.batch.num_tokens[step.inputs.rows[place]])
            offers[place] = Offer(keys[place], self._requests[keys[place]].drafter, draft, num_known)
        counts, faults = self._lengths.keep(offers, len(keys))
        step.tokens.drafter_errors.update(faults)
        self._switch_off(keys, faults)
        return {place: first_nodes(drafts[place], count) for place, count in counts.items() if count}

    def idle_drafters(self, num_requests: int) -> frozenset[str]:
        """Drafters with layers of their own that new requests should go without at this batch size."""
        idle = self._lengths.idle_drafters(num_requests)
        return frozenset(name for name in idle if self._facts[name].keeps_layers)

    def pause(self, key: int, batch: InputBatch) -> None:
        """A request leaves the batch to come back; what is known of it is kept for its drafter."""
        request = self._requests.get(key)
        if request is not None and key in batch.requests:
            request.token_ids = batch.known_tokens(key).tolist()

    def finish(self, key: int, batch: InputBatch) -> None:
        """Tells the request's drafter that it ended, in the batch or out of it."""
        request = self._requests.pop(key, None)
        self._lengths.forget(key)
        if request is not None and request.drafter in self._waiting:
            self._waiting[request.drafter].forget(key)
        if request is None or request.drafter not in self._drafters:
            return
        token_ids = batch.known_tokens(key).tolist() if key in batch.requests else request.token_ids
        try:
            self._drafters[request.drafter].worker.on_finished(key, token_ids)
        except Exception:
            logger.exception("drafter %r raised in on_finished", request.drafter)

    def finish_all(self, batch: InputBatch) -> None:
        """Every request that is known here has ended."""
        for key in list(self._requests):
            self.finish(key, batch)

    def forget_finished(self) -> None:
        """Drafters forget what requests that ended taught them."""
        for drafter in self._drafters.values():
            if isinstance(drafter.worker, LearnsFromRequests):
                drafter.worker.forget_finished()

    def _switch_off(self, keys: Sequence[int], errors: Mapping[int, str]) -> None:
        for place in errors:
            request = self._requests[keys[place]]
            request.is_on = False
            if request.drafter in self._waiting:
                self._waiting[request.drafter].forget(keys[place])

    def _states(self, name: str, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> States:
        """The target's last states and those between its layers, as far as a drafter wants them."""
        drafter = self._drafters[name]
        last = hidden if drafter.worker.capabilities.needs_hidden_states else None
        layers = drafter.config.hidden_layers
        if layer_states is None or not layers:
            return last, None
        if layers == self.hidden_layers:
            return last, layer_states
        parts = layer_states.view(len(layer_states), len(self.hidden_layers), -1)
        index = torch.tensor([self.hidden_layers.index(layer) for layer in layers], device=self._device)
        return last, parts.index_select(1, index).flatten(1)

    def _draft(
        self,
        name: str,
        requests: dict[int, DraftRequest],
        states: States,
        vocab_size: int,
        errors: dict[int, str],
        started: float,
    ) -> dict[int, Draft]:
        """One drafter's guesses for its requests, by place. A drafter that raises, or guesses what cannot be, loses
        them. `started`: when it was first asked what to draft; what that takes is a part of what drafting costs."""
        worker = self._drafters[name].worker
        num_steps = 1
        if name in self._waiting:
            num_steps += self._waiting[name].num_steps
            states = self._waiting[name].join_states(states, [request.key for request in requests.values()])
        try:
            for request in requests.values():
                if request.key in self._accepted:
                    worker.on_verified(request.key, *self._accepted[request.key])
            proposed = list(worker.propose(DraftBatch(list(requests.values()), *states)))
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
        self._lengths.called(
            DrafterCall(
                drafter=name,
                keys=[request.key for request in requests.values()],
                asked=asked,
                given=given,
                seconds=(seconds if any(asked) else seconds / num_steps) if is_decode else None,
            )
        )
        return drafts

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
        for (place, request), answer in zip(requests.items(), proposed, strict=True):
            try:
                draft = Draft([]) if answer is None else checked_draft(answer, vocab_size, self._device, trees=trees)
            except Exception as error:  # a sequence of the plugin's own may raise anything
                worker = type(self._drafters[name].worker).__name__
                errors[place] = f"{worker} proposed a draft that cannot be: {error}"
                logger.warning("request %d goes on without its drafter: %s", request.key, errors[place])
                sizes.append(None)
                continue
            given = len(draft.token_ids)
            sizes.append(given)
            self._tell_of_excess(name, given)
            if given and request.max_drafts:
                if draft.probs is not None and request.sampling.is_greedy:
                    draft = replace(draft, probs=None)  # no draws, however certain their distributions are
                drafts[place] = first_nodes(draft, request.max_drafts)
        return drafts, sizes

    def _tell_of_excess(self, name: str, given: int) -> None:
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
        places: list[int],
        step: ComputedStep,
        sampler: Sampler,
        states: States,
    ) -> dict[int, DraftRequest]:
        """What one drafter is shown, by place: all its requests, or of a stateless one those that want drafts. Nothing
        while it can wait, see `WaitingStates`."""
        facts, inputs, batch = self._facts[name], step.inputs, step.batch
        keys = [step.plan.keys[place] for place in places]
        known = batch.num_tokens[inputs.rows[places]].astype(np.int64)
        limits = np.array([self._requests[key].max_total_tokens for key in keys])
        # A round yields at least one token, so the last one that fits is never a draft.
        most = np.clip(limits - known - 1, 0, facts.num_tokens) * (step.tokens.counts[places] > 0)
        try:
            wanted = self._lengths.ask(name, keys, most, KnownTokens(batch, keys), len(step.plan.keys))
        except LengthFault as fault:
            step.tokens.drafter_errors.update(dict.fromkeys(places, str(fault)))
            return {}
        if facts.stateless:
            chosen = np.flatnonzero(wanted)
            if not len(chosen):
                return {}
            places, keys = [places[i] for i in chosen], [keys[i] for i in chosen]
            known, wanted = known[chosen], wanted[chosen]
        elif not wanted.any() and self._can_wait(name, keys, places, step, states):
            return {}
        uniforms = sampler.draft_uniforms(keys, known, int(wanted.max()))
        hidden_rows = self._standing_rows(keys, places, inputs)
        first_positions = inputs.positions[inputs.query_start[places]].tolist()
        requests = {}
        waiting = self._waiting.get(name)
        for i, (place, key, room) in enumerate(zip(places, keys, wanted.tolist(), strict=True)):
            request = batch.requests[key].request
            first_position, rows = first_positions[i], hidden_rows[i]
            if waiting is not None:
                first_position, rows = waiting.join(key, first_position, rows)
            requests[place] = DraftRequest(
                key=key,
                token_ids=batch.known_tokens(key),
                num_prompt_tokens=request.num_prompt_tokens,
                max_drafts=room,
                sampling=self._requests[key].sampling,
                hidden_rows=rows,
                uniforms=uniforms[i, :room],
                first_position=first_position,
            )
        return requests

    def _can_wait(self, name: str, keys: list[int], places: list[int], step: ComputedStep, states: States) -> bool:
        """Whether a drafter can see later what this step computed; its states are kept then."""
        bounds = step.inputs.query_start.tolist()
        is_decode = all(bounds[place + 1] - bounds[place] == 1 and step.tokens.counts[place] for place in places)
        if not is_decode:  # a request of which drafts were verified has more rows than one
            return False
        rows = [bounds[place] for place in places]
        positions: list[int] = step.inputs.positions[rows].tolist()
        waiting = self._waiting[name]
        if not waiting.may_wait(positions):
            return False
        waiting.keep(keys, rows, positions, states)
        return True

    def _standing_rows(self, keys: list[int], places: list[int], inputs: StepInputs) -> list[np.ndarray]:
        """By request, the rows of this step whose tokens stand: all but rejected drafts."""
        every = np.arange(inputs.query_start[-1], dtype=np.int64)
        ends = inputs.query_start[1:]
        starts, first_drafts = inputs.query_start[places].tolist(), (ends - inputs.num_drafts)[places].tolist()
        found = []
        for key, start, first in zip(keys, starts, first_drafts, strict=True):
            nodes = self._accepted[key][0] if key in self._accepted else []
            if nodes and nodes[-1] >= len(nodes):
                found.append(np.concatenate([every[start:first], first + np.array(nodes)]))
            else:
                found.append(every[start : first + len(nodes)])
        return found
