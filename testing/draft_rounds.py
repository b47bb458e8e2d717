"""Drives draft workers in their suites: requests in batches, and requests over several rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.contracts.draft_target import TopTokens
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft, DraftBatch, DraftWorker


@dataclass(frozen=True)
class RequestStep:
    """One request in one batch: its step computed the positions from `first` to `end`."""

    seq_id: int
    token_ids: Sequence[int]
    first: int
    end: int
    max_drafts: int
    num_prompt_tokens: int | None = None
    """None: all but five."""
    seed: int | None = None
    """Seed of the target's states and the uniforms. None: the seq_id."""
    is_sampled: bool = False
    """Temperature 1; otherwise that of even seq_ids is 1 and of odd ones 0."""
    uniforms: NDArray[np.float64] | None = None
    """None: drawn."""
    drafted: Draft | None = None
    """What the step verified."""
    prediction: Sequence[int] | None = None
    """What the request expects its output to be; drafters that do not declare `reads_prediction` are not shown it."""
    forced: Sequence[int] = ()
    """What its grammar says will come next."""

    @property
    def chosen_seed(self) -> int:
        """`seed`, or the seq_id."""
        return self.seq_id if self.seed is None else self.seed

    def sampling(self) -> SamplingParams:
        """Sampling parameters of the request."""
        return SamplingParams(temperature=1.0 if self.is_sampled or not self.seq_id % 2 else 0.0)

    def top_tokens(self, vocab_size: int, count: int) -> TopTokens:
        """What a target finds likely after the last token that the step computed and after what it verified: `count`
        tokens of each row, drawn without repetition."""
        drafted = Draft([]) if self.drafted is None else self.drafted
        follows = [self.token_ids[-2] if len(self.token_ids) > 1 else self.token_ids[-1], *drafted.token_ids]
        parents = [-1, *(parent + 1 for parent in drafted.parent_indices)]
        random = np.random.default_rng([self.chosen_seed, len(self.token_ids), 1])
        ids = [random.permutation(vocab_size)[:count] for _ in follows]
        return TopTokens(np.array(follows, np.int32), np.array(parents, np.int32), np.array(ids, np.int32))

    def predicted(self) -> NDArray[np.int32] | None:
        """`prediction`, read-only."""
        if self.prediction is None:
            return None
        predicted = np.array(self.prediction, dtype=np.int32)
        predicted.flags.writeable = False
        return predicted

    def stream(self) -> NDArray[np.float64]:
        """[max_drafts] uniforms, an array of its own."""
        if self.uniforms is not None:
            return self.uniforms[: self.max_drafts].copy()
        return np.random.default_rng([self.chosen_seed, len(self.token_ids)]).random(self.max_drafts)


@dataclass(frozen=True)
class HostBatch:
    """A batch whose arrays the host overwrites when the step is over."""

    batch: DraftBatch

    def overwrite(self) -> None:
        """Overwrites the arrays: what is still read from them is wrong from now on."""
        for request in self.batch.requests:
            top = request.top_tokens
            rows = () if top is None else (top.follows, top.parents, top.ids)
            for array in (request.token_ids.base, request.hidden_rows, request.uniforms, *rows):
                assert array is not None
                array.fill(0)
        for states in (self.batch.hidden_states, self.batch.layer_states):
            if states is not None:
                states.fill_(torch.nan)


@dataclass
class Talk:
    """A request over several rounds, as the host leads it. Verdicts go through every kind: the whole path is accepted,
    part of it, nothing, and there is none at all, as for a request that was preempted."""

    seq_id: int
    text: list[int]
    """Token where the text has no other."""
    num_known: int
    """Tokens of the prompt, and one."""
    drafts: list[Any] = field(default_factory=list)
    """What came so far, as `as_lists` has it."""
    num_taken: int = 0
    """Number of positions whose states the drafter has read."""
    _last: Draft | None = None
    _verified: Draft | None = None
    """What the latest step verified."""

    def __post_init__(self) -> None:
        self.token_ids = self.text[: self.num_known]
        self._num_prompt_tokens = self.num_known - 1

    def advance(self, worker: DraftWorker) -> None:
        """The step that verifies the last draft."""
        if not self.drafts:
            return
        accepted: list[int] = []
        self._verified = None
        round_id = len(self.drafts)
        if self._last is not None and len(self._last.token_ids) and round_id % 4:
            path = first_path(self._last)
            path = path[: {1: len(path), 2: len(path) // 2, 3: 0}[round_id % 4]]
            worker.on_verified(self.seq_id, path, len(self._last.token_ids))
            accepted = [int(self._last.token_ids[node]) for node in path]
            self._verified = self._last
        if round_id % 4 == 0:
            self.num_taken = 0  # It was preempted, so everything is computed once more.
        # Without a verdict the request has gone on for some steps of which no drafts were wanted.
        start = len(self.token_ids) + len(accepted)
        self.token_ids = [*self.token_ids, *accepted, *self.text[start : start + (1 if round_id % 4 else 7)]]

    def step(self, max_drafts: int) -> RequestStep:
        """Its part in the next batch: all states that it was not shown yet."""
        end = len(self.token_ids) - 1
        prompt = self._num_prompt_tokens
        step = RequestStep(
            self.seq_id,
            self.token_ids,
            self.num_taken,
            end,
            max_drafts,
            prompt,
            drafted=self._verified,
            prediction=self.text[prompt:],
        )
        self.num_taken = end
        return step

    def take(self, draft: Draft | None) -> None:
        """Keeps the drafter's draft."""
        self._last = None if draft is None else replace(draft, token_ids=[int(token) for token in draft.token_ids])
        tokens = [] if draft is None else list(self._last.token_ids if self._last else [])
        self.drafts.append((tokens, None if draft is None or draft.parents is None else list(draft.parents)))


@dataclass
class Misled:
    """A request whose guesses all come true, or never do: what came in its place then begins as its text does, so that
    there is more to guess."""

    seq_id: int
    text: Sequence[int]
    is_right: bool
    vocab_size: int
    num_taken: int = 0

    def __post_init__(self) -> None:
        self.token_ids = [*self.text[:30]]

    def step(self, max_drafts: int) -> RequestStep:
        """Its part in the next batch: the states of what the last step computed."""
        end = len(self.token_ids) - 1
        step = RequestStep(self.seq_id, list(self.token_ids), self.num_taken, end, max_drafts, 25)
        self.num_taken = end
        return step

    def advance(self, worker: DraftWorker, draft: Draft | None) -> None:
        """The step that verifies a draft."""
        if draft is None or not len(draft.token_ids):
            self.token_ids.append(self.text[len(self.token_ids) % len(self.text)])
            return
        path = first_path(draft) if self.is_right else []
        worker.on_verified(self.seq_id, path, len(draft.token_ids))
        self.token_ids += [int(draft.token_ids[node]) for node in path]
        if not self.is_right:
            self.token_ids += [(int(draft.token_ids[0]) + 1) % self.vocab_size, *self.text[:6]]
        self.token_ids.append(self.text[6])


def first_path(draft: Draft) -> list[int]:
    """Nodes from a child of the root down, the first child each time."""
    path: list[int] = []
    for node, parent in enumerate(draft.parent_indices):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return path


def places_in(probs: NDArray[np.float64], token_ids: Sequence[int], random: np.random.Generator) -> NDArray[np.float64]:
    """[k]: a random point in each token's part of [0, 1), which the tokens share by probability, the likely ones first.
    Points are uniform, and those of different nodes independent, if each token was drawn from its distribution."""
    order = np.argsort(-probs, axis=1, kind="stable")
    places = np.empty(len(token_ids))
    for node, token in enumerate(token_ids):
        rank = int((order[node] == token).argmax())
        before = probs[node, order[node, :rank]].sum()
        places[node] = before + random.random() * probs[node, token]
    return np.minimum(places, np.nextafter(1, 0))


def text(vocab_size: int, period: int | None = None, seed: int = 0) -> list[int]:
    """120 tokens: every `period` the same again, or no pair of tokens twice as far as the vocabulary allows."""
    random = np.random.default_rng([seed, 3])
    if period is not None:
        return [int(token) for token in np.resize(random.integers(0, vocab_size, period), 120)]
    # Walks whose strides differ: a pair comes again when the strides do.
    strides = [stride for stride in range(1, vocab_size) if math.gcd(stride, vocab_size) == 1] or [1]
    tokens = [int(random.integers(vocab_size))]
    for index in range(119):
        stride = strides[index // max(1, vocab_size - 1) % len(strides)]
        tokens.append((tokens[-1] + stride) % vocab_size)
    return tokens


def assert_same_draft(draft: Draft | None, other: Draft | None, what: str = "") -> None:
    """Asserts that two drafts are equal, probabilities but for rounding. `what` they are is for the message."""
    tokens = [(list(d.token_ids), d.parents) if d is not None else None for d in (draft, other)]
    assert tokens[0] == tokens[1], what
    if draft is not None and other is not None and draft.probs is not None and other.probs is not None:
        torch.testing.assert_close(draft.probs, other.probs, rtol=1e-4, atol=1e-5)


def as_lists(draft: Draft | None) -> Any:
    """A draft in a form that compares."""
    if draft is None or not len(draft.token_ids):
        return None
    probs = None if draft.probs is None else draft.probs.tolist()
    return list(draft.token_ids), None if draft.parents is None else list(draft.parents), probs
