"""Draft lengths in the worker: what the policies of a config are asked and reported, and what they answer, checked."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.config.resolved import Component, ResolvedDrafter
from dovetail.contracts.draft_length import (
    AdaptiveDraftLength,
    DrafterCall,
    DrafterFacts,
    DraftLength,
    DraftQuestion,
    DraftRound,
    LengthSetup,
    OfferedDrafts,
    OtherDraft,
    StepReport,
)
from dovetail.contracts.speculation import Draft
from dovetail.registry.bootstrap import LoadedPlugins

logger = logging.getLogger(__name__)


class LengthFault(Exception):
    """A policy raised, or answered what cannot be; the message names it."""


@dataclass(frozen=True)
class Offer:
    """One draft that came, of the request at one batch index."""

    seq_id: int
    drafter: str
    draft: Draft
    num_known: int


@dataclass(slots=True)
class _Policy:
    """One policy with the drafters that it serves."""

    length: DraftLength
    drafters: frozenset[str]
    fault: str | None = None
    """Why it is not called any more."""


@dataclass(slots=True)
class _Adaptive(_Policy):
    """One that adapts, with what waits to be reported to it."""

    length: AdaptiveDraftLength
    calls: list[DrafterCall] = field(default_factory=list)


class Lengths:
    """The policies of an engine, on the rank that samples. `most_requests`: no drafts in steps of more than these."""

    def __init__(self, policies: Sequence[DraftLength], most_requests: int | None):
        self._adaptive: list[_Adaptive] = []
        plain: list[_Policy] = []
        for length in policies:
            own = frozenset(length.setup.drafters)
            if isinstance(length, AdaptiveDraftLength):
                self._adaptive.append(_Adaptive(length, own))
            else:
                plain.append(_Policy(length, own))
        # Those that adapt come last: they are asked with what the others decided.
        self._policies = [*plain, *self._adaptive]
        self._of = {name: policy for policy in self._policies for name in policy.drafters}
        self._most_requests = most_requests
        self._rounds: list[DraftRound] = []
        self._computed: Counter[str] = Counter()

    def adapts(self, drafter: str) -> bool:
        """Whether the clock decides how many drafts this drafter is asked for."""
        return isinstance(self._of[drafter], _Adaptive)

    def computed(self, drafter: str, num_drafts: int) -> None:
        """The step that runs computed drafts of this drafter."""
        self._computed[drafter] += num_drafts

    def judged(self, seq_id: int, drafter: str, drafted: int, accepted: Sequence[int]) -> None:
        """Of `drafted` nodes of a request those of `accepted` were accepted."""
        if self._adaptive:
            self._rounds.append(DraftRound(seq_id=seq_id, drafter=drafter, drafted=drafted, accepted=accepted))

    def called(self, call: DrafterCall) -> None:
        """A drafter was called."""
        policy = self._of[call.drafter]
        if isinstance(policy, _Adaptive):
            policy.calls.append(call)

    def end_step(self, num_requests: int, seconds: float | None) -> None:
        """Reports the step. `seconds`: without drafters; None where it computed parts of prompts."""
        whole = self._computed.total()
        for policy in self._working():
            num_drafts = sum(self._computed[name] for name in policy.drafters)
            report = StepReport(
                num_requests=num_requests,
                num_drafts=num_drafts,
                num_other_drafts=whole - num_drafts,
                seconds=seconds,
                rounds=self._rounds,
                calls=policy.calls,
            )
            policy.calls = []
            with _noted(policy):
                policy.length.observe(report)
        self._rounds = []
        self._computed.clear()

    def allow_drafts(self, num_requests: int) -> bool:
        """Whether the config allows drafts in steps of so many requests."""
        return self._most_requests is None or num_requests <= self._most_requests

    def ask(
        self,
        drafter: str,
        seq_ids: Sequence[int],
        most: NDArray[np.int64],
        known_tokens: Callable[[int], np.ndarray],
        num_requests: int,
        behind: Sequence[int] = (),
    ) -> NDArray[np.int64]:
        """How many drafts to ask for; arguments as in `DraftQuestion`. Raises `LengthFault`."""
        if not self.allow_drafts(num_requests):
            return np.zeros_like(most)
        question = DraftQuestion(
            drafter=drafter,
            seq_ids=seq_ids,
            most=most,
            known_tokens=known_tokens,
            num_requests=num_requests,
            behind=behind,
        )
        policy = self._of[drafter]
        return _answer(policy, partial(policy.length.ask, question), most)

    def keep(self, offers: Mapping[int, Offer], num_requests: int) -> tuple[dict[int, int], dict[int, str]]:
        """How many nodes of each draft to verify, and for drafts that a policy's fault costs the reason; both by the
        batch indices of `offers`."""
        counts: dict[int, int] = {}
        faults: dict[int, str] = {}
        for policy in self._policies:
            own = [index for index, offer in offers.items() if offer.drafter in policy.drafters]
            if not own:
                continue
            mine = [offers[index] for index in own]
            others = [(offers[index], count) for index, count in counts.items()]
            offered = OfferedDrafts(
                seq_ids=[offer.seq_id for offer in mine],
                drafters=[offer.drafter for offer in mine],
                drafts=[offer.draft for offer in mine],
                num_known=[offer.num_known for offer in mine],
                num_requests=num_requests,
                others=[
                    OtherDraft(seq_id=o.seq_id, drafter=o.drafter, num_drafts=count) for o, count in others if count
                ],
            )
            most = np.array([len(offer.draft.token_ids) for offer in mine])
            try:
                lengths = _answer(policy, partial(policy.length.keep, offered), most)
            except LengthFault as fault:
                faults |= dict.fromkeys(own, str(fault))
                continue
            counts |= zip(own, lengths.tolist(), strict=True)
        return counts, faults

    def idle_drafters(self, num_requests: int) -> frozenset[str]:
        """Drafters that new requests should go without at this batch size."""
        found: set[str] = set()
        for policy in self._working():
            with _noted(policy):
                found |= policy.drafters & set(policy.length.idle_drafters(num_requests))
        return frozenset(found)

    def forget(self, seq_id: int) -> None:
        """A request ended."""
        for policy in self._working():
            with _noted(policy):
                policy.length.forget([seq_id])

    def _working(self) -> list[_Adaptive]:
        return [policy for policy in self._adaptive if policy.fault is None]


def create_lengths(
    drafters: Mapping[str, ResolvedDrafter],
    facts: Mapping[str, DrafterFacts],
    plugins: LoadedPlugins,
    most_requests: int | None,
) -> Lengths:
    """The policies of a config: one instance for all drafters that name it with the same options."""
    groups: list[tuple[Component, list[str]]] = []
    for name, drafter in drafters.items():
        names = next((names for component, names in groups if component == drafter.length), None)
        if names is None:
            groups.append((drafter.length, [name]))
        else:
            names.append(name)
    policies = []
    for component, names in groups:
        own = {name: facts[name] for name in names}
        others = {name: facts[name] for name in facts if name not in own}
        policies.append(plugins.create(component, LengthSetup(drafters=own, others=others)))
    return Lengths(policies, most_requests)


@contextmanager
def _noted(policy: _Policy) -> Iterator[None]:
    """Around a call without an answer to check: the next `ask` reports a fault."""
    try:
        yield
    except Exception as error:
        logger.warning("draft length %s raised; it is not called any more", _name(policy), exc_info=True)
        policy.fault = f"draft length {_name(policy)} raised {type(error).__name__}: {error}"


def _name(policy: _Policy) -> str:
    return type(policy.length).__name__


def _answer(policy: _Policy, call: Callable[[], Any], most: NDArray[np.int64]) -> NDArray[np.int64]:
    """What a policy answers, as integers from 0 to `most`. Raises `LengthFault`."""
    if policy.fault is not None:
        raise LengthFault(policy.fault)
    try:
        found = np.asarray(call())
    except Exception as error:
        logger.warning("draft length %s raised", _name(policy), exc_info=True)
        raise LengthFault(f"draft length {_name(policy)} raised {type(error).__name__}: {error}") from error
    if found.shape != most.shape or not np.issubdtype(found.dtype, np.integer):
        what = f"{found.dtype} of shape {found.shape}"
        raise LengthFault(f"draft length {_name(policy)} answered {what}, not {len(most)} integers")
    if len(found) and not (found.min() >= 0 and (found <= most).all()):
        raise LengthFault(f"draft length {_name(policy)} answered {found.tolist()}, outside 0 to {most.tolist()}")
    return found.astype(np.int64)
