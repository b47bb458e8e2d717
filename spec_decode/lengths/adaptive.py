"""The adaptive draft length: chooses per request, at every step, how many drafts to ask for and how many to verify.

It measures the time of steps and drafters (`step_costs`) and how often draft tokens are accepted
(`acceptance_history`), and makes the choice with the most expected tokens per second (`goodput`).

Where drafts do not pay, none are asked for. Two probe budgets, of `_PROBE_SHARE` of the time each, find out whether
they pay again: one buys unverified drafts, which are compared with the tokens that come anyway, the other verifies a
draft of one request.

A drafter with layers of its own that reads the target's states reads them even while it does not draft. After a long
time without drafts it is idle, and the engine disables it for most new requests. One that guesses from tokens alone
reads late: it costs nothing while no drafts are asked for, and has then to read what it missed, the prompt above all.
Nobody knows how many tokens are still to come, so a request gets its first draft once the drafts that it went without
would have saved the time that reading takes: as with hired and bought skis, that costs twice the best choice at most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.draft_length import (
    AdaptiveDraftLength,
    DrafterCall,
    DrafterFacts,
    DraftQuestion,
    LengthSetup,
    OfferedDrafts,
    StepReport,
)
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft
from dovetail.spec_decode.lengths.acceptance_history import AcceptanceHistory, RequestAcceptance, shared_history
from dovetail.spec_decode.lengths.goodput import choose_lengths
from dovetail.spec_decode.lengths.step_costs import DraftCosts, ReadingCosts, StepCosts

_PROBE_SHARE = 0.004
"""Share of the time that each kind of probe may cost."""
_MOST_SAVED = 4
"""Steps whose seconds the probe budget for verification may hold."""
_MARGIN, _BATCH_MARGIN = 0.02, 0.05
"""Share by which expected tokens per second must rise before tokens are drafted: for one request, and for more, where
requests whose drafts are accepted end early and leave the others to smaller steps with fewer tokens per second."""
_RECHECK, _RECHECK_NEWS, _ASK_ANEW = 16, 4, 8
"""Steps after which the policy decides again whether drafts pay: while they do not (without and with new measurements),
and while they do."""
_IDLE_AFTER = 8
"""Decisions in a row that a drafter does not pay before it is idle."""
_PLAIN_EVERY = 128
"""After so many steps with drafts there is one without, to measure it: drafts pay only compared with the current cost
of plain steps."""


@dataclass(slots=True)
class _Unverified:
    """A draft that was not verified, to be compared with the tokens that come."""

    start: int
    token_ids: Sequence[int]


@dataclass(slots=True)
class _Request:
    acceptance: RequestAcceptance
    unverified: _Unverified | None = None
    wanted: int | None = None
    """Longest draft to ask for, as last decided; None: not decided yet."""
    missed: float = 0.0
    """Seconds that drafts would have saved since the drafter last had read everything."""


class _Drafter:
    """The policy's state of one drafter."""

    def __init__(self, facts: DrafterFacts) -> None:
        self.facts = facts
        self.history: AcceptanceHistory = shared_history()
        self.costs = DraftCosts()
        self.reading = ReadingCosts()
        self.saves = 0.0
        """Seconds that a step's drafts save for each request that has one, as last decided."""
        self.asleep_at: int | None = None
        """Number of requests at which drafts were found not to pay; None: they pay, or it was not decided."""
        self.awake_at: int | None = None
        """Number of requests at which drafts were found to pay; None: they do not, or it was not decided."""
        self.steps = 0
        """Since that was found."""
        self.has_news = False
        self._misses = 0
        """How many times in a row it was found that requests would do better without it, whatever their number."""
        self._misses_at: dict[int, int] = {}
        """The same by the size class of a step's requests: that guesses pay for the last two of a batch says nothing
        about the whole batch."""

    def decided(self, num_requests: int, *, pays: bool, gains: bool) -> None:
        """Records whether drafts pay at this number of requests, which have the drafter in any case, and whether the
        requests gain by having it: drafting may pay for only a part of what reading the target's states costs."""
        self.awake_at, self.asleep_at = (num_requests, None) if pays else (None, num_requests)
        self.steps, self.has_news = 0, False
        size = num_requests.bit_length()
        self._misses_at[size] = 0 if gains else self._misses_at.get(size, 0) + 1
        self._misses = 0 if gains else self._misses + 1

    def is_idle(self, num_requests: int) -> bool:
        """Whether the drafter has only cost time for long, with no sign of a gain at this number of requests. Decisions
        at other sizes count where they agree."""
        misses_here = self._misses_at.get(num_requests.bit_length(), self._misses)
        misses = max(misses_here, self._misses) if misses_here else 0
        costs_unasked = self.facts.keeps_layers and not self.facts.reads_late
        return costs_unasked and misses >= _IDLE_AFTER

    def sleeps(self, num_requests: int) -> bool:
        """Whether drafts were found not to pay at this number of requests, and it is too early to ask again."""
        patience = _RECHECK_NEWS if self.has_news else _RECHECK
        return self.asleep_at == num_requests and self.steps + 1 < patience


class AdaptiveLength(AdaptiveDraftLength):
    """Chooses the draft length with the most measured tokens per second, down to 0."""

    contract = (1, 1)

    def __init__(self, options: PluginOptions, setup: LengthSetup):
        super().__init__(options, setup)
        self._drafters = {name: _Drafter(facts) for name, facts in {**setup.drafters, **setup.others}.items()}
        self._requests: dict[int, _Request] = {}
        self._costs = StepCosts()
        self._ask_budget = self._verify_budget = 0.0
        self._ask_price = 0.0
        """Seconds of the cheapest probe that the budget was too small for."""
        self._since_plain = 0
        """Steps since one without drafts of the policy's drafters."""
        self._num_others = 0
        """Drafts of other policies in the last step that was measured."""
        self._turn = 0

    def observe(self, report: StepReport) -> None:
        for one in report.rounds:
            self._judged(one.seq_id, one.drafter, one.drafted, one.accepted)
        for call in report.calls:
            self._called(call)
        if report.seconds is None:
            return
        seconds, num_drafts = report.seconds, report.num_drafts + report.num_other_drafts
        self._costs.observe(report.num_requests, report.num_requests + num_drafts, seconds)
        self._since_plain = self._since_plain + 1 if report.num_drafts else 0
        self._num_others = report.num_other_drafts
        self._ask_budget = min(self._ask_budget + _PROBE_SHARE * seconds, max(seconds, self._ask_price))
        self._verify_budget = min(self._verify_budget + _PROBE_SHARE * seconds, _MOST_SAVED * seconds)

    def ask(self, question: DraftQuestion) -> NDArray[np.int64]:
        drafter, num_requests = self._drafters[question.drafter], question.num_requests
        lengths = np.zeros(len(question.seq_ids), dtype=np.int64)
        if drafter.sleeps(num_requests) and drafter.costs.call(1, 1) > self._ask_budget:
            # Where drafts do not pay, looking for them must not cost anything either: the budget has not enough for the
            # cheapest probe, and what is there to compare can be compared later.
            drafter.steps += 1
            return lengths
        self._compare(question)
        indices = np.flatnonzero(question.most)
        if not len(indices) or not self._may_draft(num_requests):
            return lengths
        asleep = drafter.sleeps(num_requests)
        drafter.steps += 1
        if asleep:
            self._buy_probes(drafter, question, indices, lengths)
            return lengths
        most = question.most[indices]
        requests = [self._request(question.seq_ids[index], question.drafter) for index in indices.tolist()]
        if not self._is_awake(drafter, requests, num_requests):
            wanted, gain, saved = self._best_asks(drafter, requests, most, num_requests)
            drafter.saves = saved / max(1, sum(length > 0 for length in wanted))
            for request, length in zip(requests, wanted, strict=True):
                request.wanted = length
            drafter.decided(num_requests, pays=any(wanted), gains=gain > 1 + _margin(num_requests))
        lengths[indices] = np.minimum([request.wanted or 0 for request in requests], most)
        if question.behind:
            self._put_off(drafter, requests, indices, question.behind, lengths)
        self._buy_probes(drafter, question, indices[lengths[indices] == 0], lengths)
        return lengths

    def _put_off(
        self,
        drafter: _Drafter,
        requests: Sequence[_Request],
        indices: NDArray[np.int64],
        behind: Sequence[int],
        lengths: NDArray[np.int64],
    ) -> None:
        """Clears `lengths` of requests for which reading what the drafter missed does not pay yet."""
        for request, index in zip(requests, indices.tolist(), strict=True):
            if not behind[index]:
                request.missed = 0.0
            elif lengths[index]:
                request.missed += drafter.saves
                if request.missed < drafter.reading.seconds(behind[index]):
                    lengths[index] = 0

    def keep(self, offered: OfferedDrafts) -> Sequence[int]:
        num_requests = offered.num_requests
        requests = [self._request(*of) for of in zip(offered.seq_ids, offered.drafters, strict=True)]
        gains = [
            request.acceptance.gains(len(draft.token_ids))
            for request, draft in zip(requests, offered.drafts, strict=True)
        ]
        num_others = sum(other.num_drafts for other in offered.others)
        seconds = self._costs.step(num_requests, num_others + sum(map(len, gains)))[num_others:]
        tokens = num_requests + sum(
            sum(self._request(other.seq_id, other.drafter).acceptance.gains(other.num_drafts))
            for other in offered.others
        )
        most = self._costs.most_drafts(num_requests) - num_others
        lengths, _ = choose_lengths(gains, tokens, seconds, _margin(num_requests), most)
        compares = [
            self._compares(drafter, draft) for drafter, draft in zip(offered.drafters, offered.drafts, strict=True)
        ]
        if not any(lengths):
            index = self._turn % len(lengths)
            lengths[index] = self._bought(seconds, len(gains[index]), compares=compares[index])
        for i, request in enumerate(requests):
            if not lengths[i] and compares[i]:
                request.unverified = _Unverified(offered.num_known[i], offered.drafts[i].token_ids)
        return lengths

    def idle_drafters(self, num_requests: int) -> Collection[str]:
        return [name for name in self.setup.drafters if self._drafters[name].is_idle(num_requests)]

    def forget(self, seq_ids: Collection[int]) -> None:
        for seq_id in seq_ids:
            self._requests.pop(seq_id, None)

    def _request(self, seq_id: int, drafter: str) -> _Request:
        request = self._requests.get(seq_id)
        if request is None:
            known = self._drafters[drafter]
            acceptance = RequestAcceptance(known.history, trees=known.facts.trees)
            request = self._requests[seq_id] = _Request(acceptance)
        return request

    def _judged(self, seq_id: int, drafter: str, drafted: int, accepted: Sequence[int]) -> None:
        """Counts `drafted` nodes, of which `accepted` are right."""
        request = self._request(seq_id, drafter)
        request.unverified = None
        request.acceptance.judged(drafted, accepted)
        self._drafters[drafter].has_news = True

    def _called(self, call: DrafterCall) -> None:
        asked = [length for length in call.asked if length > 0]
        if call.seconds is not None:
            costs = self._drafters[call.drafter].costs
            costs.observe(len(asked) or len(call.asked), max(asked, default=0), call.seconds)
        if call.late_seconds is not None:
            drafter = self._drafters[call.drafter]
            drafts = drafter.costs.call(len(asked), max(asked)) if asked else 0.0
            drafter.reading.observe(call.num_late, call.late_seconds - drafts)
        for seq_id, length, given in zip(call.seq_ids, call.asked, call.given, strict=True):
            if length and given is not None:
                self._request(seq_id, call.drafter).acceptance.offered(length, given)

    def _compare(self, question: DraftQuestion) -> None:
        """Compares unverified drafts with the tokens that came."""
        for seq_id in question.seq_ids:
            request = self._requests.get(seq_id)
            if request is None or request.unverified is None:
                continue
            guesses = request.unverified.token_ids
            start = request.unverified.start
            come: list[int] = question.known_tokens(seq_id)[start : start + len(guesses)].tolist()
            right = next((i for i, token in enumerate(come) if token != guesses[i]), len(come))
            if right < len(come) or len(come) == len(guesses):
                self._judged(seq_id, question.drafter, len(guesses), range(right))

    def _compares(self, drafter: str, draft: Draft) -> bool:
        """Whether a token equal to the draft means that the draft would have been accepted."""
        return draft.probs is None and not self._drafters[drafter].facts.trees

    def _may_draft(self, num_requests: int) -> bool:
        """Whether a step of this size was measured without drafts, except those of other policies: only then may the
        drafter draft."""
        return self._costs.knows(num_requests, self._num_others) and self._since_plain < _PLAIN_EVERY

    def _is_awake(self, drafter: _Drafter, requests: Sequence[_Request], num_requests: int) -> bool:
        """Whether the decision of a few steps ago still holds; how much to verify is decided at every step."""
        is_fresh = drafter.awake_at == num_requests and drafter.steps < _ASK_ANEW
        return is_fresh and all(request.wanted is not None for request in requests)

    def _best_asks(
        self, drafter: _Drafter, requests: Sequence[_Request], most: NDArray[np.int64], num_requests: int
    ) -> tuple[list[int], float, float]:
        """Returns the longest useful draft for each request that should have one, 0 for the others; the tokens per
        second with these drafts, as a factor of those of requests without the drafter; and the seconds that they save,
        compared with a step without drafts.

        For each length, `choose_lengths` picks the drafts with the most tokens per second, at the cost of the drafter's
        call for that length. Two requests with gains [0.8, 0.3] and [0.2, 0.1]; a step takes 20 ms and 2 ms per draft
        token; calls for 0, 1, 2 tokens take 1, 2, 3 ms, and the drafter keeps layers, so it is always called::

            no draft token       2.0 tokens in 20 + 1 ms    0.095 per ms
            length 1: [1, 0]     2.8 tokens in 22 + 2 ms    0.117 per ms
            length 2: [2, 0]     3.1 tokens in 24 + 3 ms    0.115 per ms

        The asks are [1, 0]. Without the drafter it would be 2.0 tokens in 20 ms: the factor is 0.117 / 0.1 = 1.17.
        """
        gains = []
        for request, most_of in zip(requests, most.tolist(), strict=True):
            share = request.acceptance.share_offered
            gains.append([share * gain for gain in request.acceptance.gains(most_of)])
        seconds = self._costs.step(num_requests, self._num_others + sum(map(len, gains)))[self._num_others :]
        longest = int(most.max())
        calls = [drafter.costs.call(len(requests), length) for length in range(longest + 1)]
        # Asked or not, a drafter that is called anyway costs what it costs without drafts.
        unasked = 0.0 if drafter.facts.stateless or drafter.facts.reads_late else calls[0]
        first = longest if calls[longest] - calls[1] < 0.01 * seconds[0] else 1
        best, best_factor, best_length = [0] * len(requests), 1.0, 0
        for length in range(first, longest + 1):
            whole = seconds + calls[length]
            whole[0] = seconds[0] + unasked
            lengths, factor = choose_lengths(
                [own[:length] for own in gains], num_requests, whole, _margin(num_requests)
            )
            if factor > best_factor:
                best, best_factor, best_length = lengths, factor, length
        plain = float(seconds[0])
        asks = [best_length if length else 0 for length in best]
        return asks, best_factor * plain / (plain + unasked), (plain + unasked) * (1 - 1 / best_factor)

    def _buy_probes(
        self, drafter: _Drafter, question: DraftQuestion, indices: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """Asks for unverified drafts of requests that get no draft, within the budget, each request in its turn."""
        if not len(indices):
            return
        self._turn += 1
        behind = question.behind or [0] * len(lengths)
        for index in sorted(np.roll(indices, -(self._turn % len(indices))).tolist(), key=behind.__getitem__):
            if self._request(question.seq_ids[index], question.drafter).unverified is not None:
                continue
            length = int(question.most[index]) if drafter.facts.stateless else 1
            price = drafter.costs.call(1, length) + drafter.reading.seconds(behind[index])
            if price > self._ask_budget:
                self._ask_price = price
                return
            self._ask_budget -= price
            self._ask_price = 0.0
            lengths[index] = length

    def _bought(self, seconds: NDArray[np.float64], length: int, *, compares: bool) -> int:
        """Returns how many nodes of a draft the probe budget can verify, though none is expected to pay."""
        # Comparing drafts with tokens, where it is possible, gives acceptance rates; only verifying gives its cost.
        length = length if compares else 1
        price = float(seconds[length] - seconds[0])
        if max(price, float(seconds[0]) if compares else 0.0) > self._verify_budget:
            return 0
        self._verify_budget = 0.0
        return length


def _margin(num_requests: int) -> float:
    return _MARGIN if num_requests == 1 else _BATCH_MARGIN
