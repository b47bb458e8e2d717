"""The length of speculation: how many guesses are asked of a drafter, and how many of those it gives are verified.

`fixed` asks for `num_tokens` and verifies what comes. `confidence` cuts a draft where the drafter itself doubts it.
`adaptive` chooses both numbers per request, at every step, by what steps and drafts were measured to cost
(`step_costs`), how often drafts stood (`acceptance_history`) and what yields the most tokens per second (`goodput`).

Where drafts do not pay, none are asked for, and evidence that they would pay again comes from two purses, each of which
may spend `_PURSE` of the time: one buys drafts that are not verified but compared with the tokens that come anyway, the
other verifies a draft of one request.

A drafter with layers of its own takes in what the target computes even while it guesses nothing. Where that went on for
long it is `idle`, by which the engine lets most requests that come go without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft
from dovetail.worker.speculation.acceptance_history import AcceptanceHistory, RequestAcceptance, shared_history
from dovetail.worker.speculation.confidence import confident_part
from dovetail.worker.speculation.goodput import choose_lengths
from dovetail.worker.speculation.step_costs import DraftCosts, StepCosts
from dovetail.worker.speculation.verifier import first_nodes

_PURSE = 0.004
"""Share of the time that each kind of probe may cost."""
_MOST_SAVED = 4
"""Steps whose seconds the purse for verification may hold."""
_MARGIN, _BATCH_MARGIN = 0.02, 0.05
"""Share by which tokens per second must be expected to rise before anything is drafted: for one request, and for more,
of which those whose guesses stand leave the others to smaller steps, that yield less per second."""
_RECHECK, _RECHECK_NEWS, _ASK_ANEW = 16, 4, 8
"""Steps after which it is asked again whether drafts would pay at all: while they do not (and nothing new is known, or
something is), and while they do."""
_IDLE_AFTER = 8
"""So many times in a row it must be found that a drafter does not pay before it is idle."""
_PLAIN_EVERY = 128
"""After so many steps with drafts there is one without, to see what it costs now: however well drafts seem to pay, they
do so beside what plain steps are thought to cost."""


@dataclass(frozen=True)
class LengthSetting:
    """What the config and the drafter say about the length of its drafts."""

    num_tokens: int
    length: str = "fixed"
    """"fixed", "confidence" or "adaptive"."""
    min_confidence: float = 0.0
    stateless: bool = False
    kv_cache: bool = False
    trees: bool = False
    draws: bool = False
    """Whether the drafter gives the distributions that it draws from: the tokens of a sampled request then depend on
    how many drafts there are."""


@dataclass(slots=True)
class _Shadow:
    """A draft that was not verified, to be compared with the tokens that come."""

    start: int
    token_ids: Sequence[int]


@dataclass(slots=True)
class _Request:
    drafter: str
    acceptance: RequestAcceptance
    adapts: bool
    draws: bool
    shows: bool
    """Whether a token equal to the draft means that the draft would have stood."""
    shadow: _Shadow | None = None
    wanted: int | None = None
    """Longest draft to ask for, as last decided; None: not yet."""


class _Drafter:
    """What is known of one drafter."""

    def __init__(self, setting: LengthSetting) -> None:
        self.setting = setting
        self.history: AcceptanceHistory = shared_history()
        self.costs = DraftCosts()
        self.asleep_at: int | None = None
        """Number of requests at which drafts were found not to pay; None: they pay, or nobody looked."""
        self.awake_at: int | None = None
        """Number of requests at which they were found to pay; None: they do not, or nobody looked."""
        self.steps = 0
        """Since that was found."""
        self.has_news = False
        self._misses = 0
        """How many times in a row it was found that requests would do better without it, whatever their number."""
        self._misses_at: dict[int, int] = {}
        """The same by the size class of a step's requests: that guesses pay for the last two of a batch says nothing
        about the whole batch."""

    def decided(self, num_requests: int, *, pays: bool, gains: bool) -> None:
        """It was found whether drafts pay at this number of requests, which have the drafter in any case, and whether
        these gain by having it: it may be that guessing pays for a part of what taking everything in costs."""
        self.awake_at, self.asleep_at = (num_requests, None) if pays else (None, num_requests)
        self.steps, self.has_news = 0, False
        size = num_requests.bit_length()
        self._misses_at[size] = 0 if gains else self._misses_at.get(size, 0) + 1
        self._misses = 0 if gains else self._misses + 1

    def is_idle(self, num_requests: int) -> bool:
        """Whether it has only cost for long, and there is no sign that it does not at this number of requests. What is
        known of other numbers counts where it says the same."""
        misses_here = self._misses_at.get(num_requests.bit_length(), self._misses)
        misses = max(misses_here, self._misses) if misses_here else 0
        return self.setting.kv_cache and misses >= _IDLE_AFTER

    def sleeps(self, num_requests: int) -> bool:
        """Whether drafts were found not to pay at this number of requests, and it is too early to ask again."""
        patience = _RECHECK_NEWS if self.has_news else _RECHECK
        return self.asleep_at == num_requests and self.steps + 1 < patience


class DraftLengths:
    """Lives on the rank that samples. `strict`: no token may depend on the clock."""

    def __init__(self, settings: Mapping[str, LengthSetting], *, strict: bool, disable_by_batch_size: int | None):
        self._drafters = {name: _Drafter(setting) for name, setting in settings.items()}
        self._strict = strict
        self._most_requests = disable_by_batch_size
        self._requests: dict[int, _Request] = {}
        self._costs = StepCosts()
        self.adapts = any(setting.length == "adaptive" for setting in settings.values())
        """Whether anything is measured at all."""
        self._ask_purse = self._verify_purse = 0.0
        self._since_plain = 0
        """Steps since one without drafts of requests that adapt."""
        self._next_fixed, self._next_adapts = 0, False
        """Drafts of requests that do not adapt, and whether there are others, in the step that comes."""
        self._num_fixed = 0
        """The former in the last step that was measured."""
        self._turn = 0

    def add(self, key: int, drafter: str, sampling: SamplingParams) -> None:
        """A new request of `drafter` comes."""
        chosen = self._drafters[drafter]
        setting = chosen.setting
        adapts = setting.length == "adaptive"
        # With drafts that were drawn another number of them gives other tokens of the same distribution. A seed
        # promises the same tokens, so where the clock decides how many there are, they are not drawn: a best guess
        # stands if it is the token that comes anyway.
        promises = sampling.seed is not None or self._strict
        draws = setting.draws and not sampling.is_greedy and not (adapts and promises)
        self._requests[key] = _Request(
            drafter,
            RequestAcceptance(chosen.history, trees=setting.trees),
            adapts=adapts,
            draws=draws,
            shows=not draws and not setting.trees,
        )

    def draws(self, key: int) -> bool:
        """Whether the request's drafts may be drawn; otherwise they are to be the drafter's best guesses."""
        return self._requests[key].draws

    def idle(self, num_requests: int) -> frozenset[str]:
        """Drafters that new requests, beside so many, had better go without."""
        return frozenset(name for name, drafter in self._drafters.items() if drafter.is_idle(num_requests))

    def forget(self, key: int) -> None:
        """A request ended."""
        self._requests.pop(key, None)

    def measured(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """A step that computed one known token of each request and `num_rows - num_requests` drafts, drafting itself
        not included."""
        if not self.adapts:
            return
        self._costs.observe(num_requests, num_rows, seconds)
        self._since_plain = self._since_plain + 1 if self._next_adapts else 0
        self._num_fixed = min(self._next_fixed, num_rows - num_requests)
        self._ask_purse = min(self._ask_purse + _PURSE * seconds, seconds)
        self._verify_purse = min(self._verify_purse + _PURSE * seconds, _MOST_SAVED * seconds)

    def judged(self, key: int, drafted: int, nodes: Sequence[int]) -> None:
        """Of `drafted` nodes those of `nodes` stood."""
        request = self._requests[key]
        request.shadow = None
        if self.adapts:
            request.acceptance.judged(drafted, nodes)
            self._drafters[request.drafter].has_news = True

    def compare(self, key: int, token_ids: NDArray[np.int32]) -> None:
        """All known tokens of a request, for the draft that was kept to be compared with them."""
        request = self._requests[key]
        shadow = request.shadow
        if shadow is None:
            return
        come: list[int] = token_ids[shadow.start : shadow.start + len(shadow.token_ids)].tolist()
        for position, (token, guess) in enumerate(zip(come, shadow.token_ids, strict=False)):
            if token != guess:
                self.judged(key, len(shadow.token_ids), range(position))
                return
        if len(come) == len(shadow.token_ids):
            self.judged(key, len(come), range(len(come)))

    def ask(self, name: str, keys: Sequence[int], rooms: NDArray[np.int64], num_requests: int) -> NDArray[np.int64]:
        """How many drafts to ask for, for requests of one drafter.

        Args:
            rooms: int64, for each of `keys`: the most that it can use, 0 while its prompt is incomplete.
            num_requests: of the whole step, those without drafters included.
        """
        if self._most_requests is not None and num_requests > self._most_requests:
            return np.zeros_like(rooms)
        drafter = self._drafters[name]
        if drafter.setting.length != "adaptive":
            return rooms
        free = np.array([self._requests[key].adapts for key in keys]) & (rooms > 0)
        lengths = np.where(free, 0, rooms)
        if not free.any() or not self._may_draft(num_requests):
            return lengths
        places = np.flatnonzero(free)
        asleep = drafter.sleeps(num_requests)
        drafter.steps += 1
        if asleep:
            self._buy_shadows(drafter, keys, rooms, places, lengths)
            return lengths
        requests = [self._requests[keys[place]] for place in places.tolist()]
        if not self._is_awake(drafter, requests, num_requests):
            wanted, gain = self._best_asks(drafter, requests, rooms[places], num_requests)
            for request, length in zip(requests, wanted, strict=True):
                request.wanted = length
            drafter.decided(num_requests, pays=any(wanted), gains=gain > 1 + _margin(num_requests))
        lengths[places] = np.minimum([request.wanted or 0 for request in requests], rooms[places])
        self._buy_shadows(drafter, keys, rooms, places[lengths[places] == 0], lengths)
        return lengths

    def rests(self, name: str, keys: Sequence[int], num_requests: int) -> bool:
        """Whether `ask` would want no drafts, told without asking for each request: in a step where drafts do not pay,
        looking for them must not cost anything either. Arguments as for `ask`; `rested` is called in its place."""
        drafter = self._drafters[name]
        # The purse has not enough for the cheapest probe, and what is there to compare can be compared later.
        rests = drafter.sleeps(num_requests) and drafter.costs.call(1, 1) > self._ask_purse
        return rests and all(self._requests[key].adapts for key in keys)

    def rested(self, name: str) -> None:
        """A step went by without asking the drafter for anything."""
        self._drafters[name].steps += 1

    def called(self, name: str, lengths: Sequence[int], seconds: float) -> None:
        """A drafter took `seconds` for requests of which it was asked for drafts of up to these lengths."""
        if self.adapts:
            asked = [length for length in lengths if length > 0]
            self._drafters[name].costs.observe(len(asked) or len(lengths), max(asked, default=0), seconds)

    def keep(
        self, drafts: Mapping[int, Draft], keys: Mapping[int, int], known: Mapping[int, int], num_requests: int
    ) -> dict[int, Draft]:
        """The part of each draft that is worth verifying. `keys` and `known` (number of known tokens) are by the same
        places as `drafts`. To be called in every step: it also notes what the next one holds."""
        kept = dict(drafts)
        for place, draft in drafts.items():
            setting = self._drafters[self._requests[keys[place]].drafter].setting
            if setting.length == "confidence":
                kept[place] = confident_part(draft, setting.min_confidence)
        places = [place for place in drafts if self._requests[keys[place]].adapts]
        if places:
            self._keep_best(kept, places, keys, known, num_requests)
        num_kept = sum(len(draft.token_ids) for draft in kept.values())
        num_adapted = sum(len(kept[place].token_ids) for place in places)
        self._next_adapts, self._next_fixed = num_adapted > 0, num_kept - num_adapted
        return {place: draft for place, draft in kept.items() if len(draft.token_ids)}

    def offered(self, key: int, asked: int, given: int) -> None:
        """A drafter that was asked for `asked` tokens gave `given`."""
        request = self._requests[key]
        if request.adapts:
            request.acceptance.offered(asked, given)

    def _may_draft(self, num_requests: int) -> bool:
        """Not before it is known what a step of this size costs without drafts; those of requests that do not adapt
        are there in any case."""
        return self._costs.knows(num_requests, self._num_fixed) and self._since_plain < _PLAIN_EVERY

    def _is_awake(self, drafter: _Drafter, requests: Sequence[_Request], num_requests: int) -> bool:
        """Whether what was decided a few steps ago still serves; how much to verify is decided at every step."""
        is_fresh = drafter.awake_at == num_requests and drafter.steps < _ASK_ANEW
        return is_fresh and all(request.wanted is not None for request in requests)

    def _best_asks(
        self, drafter: _Drafter, requests: Sequence[_Request], rooms: NDArray[np.int64], num_requests: int
    ) -> tuple[list[int], float]:
        """The longest useful draft for the requests that should have any, 0 for the others; and tokens per second with
        these, as a share of those that requests without this drafter would come to."""
        gains = []
        for request, room in zip(requests, rooms.tolist(), strict=True):
            share = request.acceptance.share_offered
            gains.append([share * gain for gain in request.acceptance.gains(room)])
        seconds = self._costs.step(num_requests, self._num_fixed + sum(map(len, gains)))[self._num_fixed :]
        longest = int(rooms.max())
        calls = [drafter.costs.call(len(requests), length) for length in range(longest + 1)]
        # Told or not, a drafter that is called anyway costs what it costs without drafts.
        unasked = 0.0 if drafter.setting.stateless else calls[0]
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
        without = float(seconds[0]) / (float(seconds[0]) + unasked)
        return [best_length if length else 0 for length in best], best_factor * without

    def _buy_shadows(
        self,
        drafter: _Drafter,
        keys: Sequence[int],
        rooms: NDArray[np.int64],
        places: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Asks for drafts of requests that are to have none, as far as the purse goes, each request in its turn."""
        if not len(places):
            return
        self._turn += 1
        for place in np.roll(places, -(self._turn % len(places))).tolist():
            if self._requests[keys[place]].shadow is not None:
                continue
            length = int(rooms[place]) if drafter.setting.stateless else 1
            price = drafter.costs.call(1, length)
            if price > self._ask_purse:
                return
            self._ask_purse -= price
            lengths[place] = length

    def _keep_best(
        self,
        kept: dict[int, Draft],
        places: Sequence[int],
        keys: Mapping[int, int],
        known: Mapping[int, int],
        num_requests: int,
    ) -> None:
        """Cuts the drafts at `places`, which are those of requests that adapt; the others are verified in any case."""
        others = [place for place in kept if not self._requests[keys[place]].adapts]
        num_fixed = sum(len(kept[place].token_ids) for place in others)
        gains = [self._requests[keys[place]].acceptance.gains(len(kept[place].token_ids)) for place in places]
        seconds = self._costs.step(num_requests, num_fixed + sum(map(len, gains)))[num_fixed:]
        tokens = num_requests + sum(
            sum(self._requests[keys[place]].acceptance.gains(len(kept[place].token_ids))) for place in others
        )
        most = self._costs.most_drafts(num_requests) - num_fixed
        lengths, _ = choose_lengths(gains, tokens, seconds, _margin(num_requests), most)
        if not any(lengths):
            index = self._turn % len(places)
            lengths[index] = self._bought(self._requests[keys[places[index]]], seconds, len(gains[index]))
        for place, length in zip(places, lengths, strict=True):
            request, draft = self._requests[keys[place]], kept[place]
            if not length and request.shows:
                request.shadow = _Shadow(known[place], draft.token_ids)
            kept[place] = first_nodes(draft, length)

    def _bought(self, request: _Request, seconds: NDArray[np.float64], length: int) -> int:
        """As much of a draft as the purse has verification for, though none is expected to pay."""
        # Comparing tells how often drafts stand, where it does; what verification costs, only doing it tells.
        length = length if request.shows else 1
        price = float(seconds[length] - seconds[0])
        if max(price, float(seconds[0]) if request.shows else 0.0) > self._verify_purse:
            return 0
        self._verify_purse = 0.0
        return length


def _margin(num_requests: int) -> float:
    return _MARGIN if num_requests == 1 else _BATCH_MARGIN
