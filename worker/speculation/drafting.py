"""Drafting in the runner: what each drafter is shown of a step, and what it guesses for the next one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft, DraftBatch, DraftRequest
from dovetail.contracts.step import NewRequest
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.input_batch import InputBatch, StepInputs
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.checked import checked_draft
from dovetail.worker.speculation.draft_lengths import DraftLengths, LengthSetting
from dovetail.worker.speculation.drafters import LoadedDrafter, wanted_layers
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


class Drafting:
    """The drafters of an engine, and the requests that have one. Ranks that do not draft know the requests alone."""

    def __init__(
        self,
        drafters: Mapping[str, LoadedDrafter],
        settings: Mapping[str, LengthSetting],
        lengths: DraftLengths,
        waiting: Mapping[str, WaitingStates],
        max_model_len: int,
        device: torch.device,
    ):
        self._drafters = dict(drafters)
        self._settings = dict(settings)
        self._waiting = dict(waiting)
        """Of the drafters that are to see every position."""
        self._max_model_len = max_model_len
        self._device = device
        self._excessive: set[str] = set()
        """Drafters that gave more than anybody asks for, which was told."""
        self.lengths = lengths
        """How many drafts are worth their while; looked at on the rank that answers alone."""
        self.max_drafts = max(setting.num_tokens for setting in self._settings.values())
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
        elif request.drafter is not None:
            limit = self._max_model_len
            if request.sampling.max_tokens is not None:
                limit = min(limit, request.num_prompt_tokens + request.sampling.max_tokens)
            self.lengths.add(request.key, request.drafter, request.sampling)
            sampling = request.sampling
            if self._settings[request.drafter].draws and not self.lengths.draws(request.key):
                sampling = replace(sampling, temperature=0.0)
            self._requests[request.key] = DraftedFor(request.drafter, limit, sampling)

    def judged(self, key: int, drafted: int, nodes: list[int]) -> str:
        """Of `drafted` nodes those of `nodes` stood. Returns the drafter's name."""
        self._accepted[key] = (nodes, drafted)
        self.lengths.judged(key, drafted, nodes)
        return self._requests[key].drafter

    def propose(self, step: ComputedStep, sampler: Sampler) -> dict[int, Draft]:
        """What all drafters guess for the next step, by place in the plan. Their errors go to `step.tokens`."""
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
        drafted_keys = {place: keys[place] for place in drafts}
        known = {place: int(step.batch.num_tokens[step.inputs.rows[place]]) for place in drafts}
        return self.lengths.keep(drafts, drafted_keys, known, len(keys))

    def end_step(self) -> None:
        """What was judged in this step is known to whom it concerns."""
        self._accepted.clear()

    def pause(self, key: int, batch: InputBatch) -> None:
        """A request leaves the batch to come back; what is known of it is kept for its drafter."""
        request = self._requests.get(key)
        if request is not None and key in batch.requests:
            request.token_ids = batch.known_tokens(key).tolist()

    def finish(self, key: int, batch: InputBatch) -> None:
        """Tells the request's drafter that it ended, in the batch or out of it."""
        request = self._requests.pop(key, None)
        self.lengths.forget(key)
        if request is not None and request.drafter in self._waiting:
            self._waiting[request.drafter].forget(key)
        if request is None or request.drafter not in self._drafters:
            return
        token_ids = batch.known_tokens(key).tolist() if key in batch.requests else request.token_ids
        try:
            self._drafters[request.drafter].worker.on_finished(key, token_ids)
        except Exception:
            logger.exception("drafter %r raised in on_finished", request.drafter)

    def forget_finished(self, batch: InputBatch) -> None:
        """Every request that is known here has ended, and drafters forget what it taught them."""
        for key in list(self._requests):
            # Plans tell of ends with the next step: too late, its answer would be learned then.
            self.finish(key, batch)
        for drafter in self._drafters.values():
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
        asked = [request.max_drafts for request in requests.values()]
        seconds = time.perf_counter() - started
        # Parts of prompts are no part of what drafting costs; what was put off belongs to the steps that put it off.
        most_rows = len(requests) * (num_steps + self._settings[name].num_tokens)
        if sum(len(request.hidden_rows) for request in requests.values()) <= most_rows:
            self.lengths.called(name, asked, seconds if any(asked) else seconds / num_steps)
        return self._checked(name, requests, proposed, vocab_size, errors)

    def _checked(
        self,
        name: str,
        requests: dict[int, DraftRequest],
        proposed: Sequence[Draft | None],
        vocab_size: int,
        errors: dict[int, str],
    ) -> dict[int, Draft]:
        """What can be used of a drafter's answers, by place."""
        drafts = {}
        trees = self._settings[name].trees
        for (place, request), answer in zip(requests.items(), proposed, strict=True):
            try:
                draft = Draft([]) if answer is None else checked_draft(answer, vocab_size, self._device, trees=trees)
            except Exception as error:  # a sequence of the plugin's own may raise anything
                worker = type(self._drafters[name].worker).__name__
                errors[place] = f"{worker} proposed a draft that cannot be: {error}"
                logger.warning("request %d goes on without its drafter: %s", request.key, errors[place])
                continue
            given = len(draft.token_ids)
            self._tell_of_excess(name, given)
            if request.max_drafts:
                self.lengths.offered(request.key, request.max_drafts, given)
            if given and request.max_drafts:
                if draft.probs is not None and request.sampling.is_greedy:
                    draft = replace(draft, probs=None)  # no draws, however certain their distributions are
                drafts[place] = first_nodes(draft, request.max_drafts)
        return drafts

    def _tell_of_excess(self, name: str, given: int) -> None:
        """Cutting a draft is part of the contract, but what no request ever asks for is computed for nothing."""
        most = self._settings[name].num_tokens
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
        setting, inputs, batch = self._settings[name], step.inputs, step.batch
        keys = [step.plan.keys[place] for place in places]
        num_requests = len(step.plan.keys)
        if self.lengths.rests(name, keys, num_requests) and (
            setting.stateless or self._can_wait(name, keys, places, step, states)
        ):
            self.lengths.rested(name)
            return {}
        known = batch.num_tokens[inputs.rows[places]].astype(np.int64)
        limits = np.array([self._requests[key].max_total_tokens for key in keys])
        # A round yields at least one token, so the last one that fits is never a draft.
        rooms = np.clip(limits - known - 1, 0, setting.num_tokens) * (step.tokens.counts[places] > 0)
        if self.lengths.adapts:
            for key in keys:
                self.lengths.compare(key, batch.known_tokens(key))
        wanted = self.lengths.ask(name, keys, rooms, num_requests)
        if setting.stateless:
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
        if self._accepted or not is_decode:
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
