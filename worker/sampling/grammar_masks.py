"""Masks of grammars: which tokens may be drawn from each row of logits of the requests that have a grammar.

start    before the forward pass: threads fill the rows of masks of this step
apply    after it: the logits of all other tokens become minus infinity
advance  the tokens of the step are taken
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Matcher
from dovetail.contracts.grammar_spec import OutputGrammar
from dovetail.contracts.step import NewRequest
from dovetail.nn.host_copies import on_device
from dovetail.worker.sampling.delayed_matcher import DelayedMatcher
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler

Paths = Sequence[Sequence[int]]
"""For each row of a request, the draft tokens behind its last known one that lead to the row."""
NO_DRAFT: Paths = ((),)

_NUM_THREADS = 4
_ROWS_OF_A_TASK = 8
"""Requests whose masks one thread fills: handing over takes as long as a few masks."""
_NO_GRAMMAR = "this engine has no grammar plugin: set grammar in the config"


@dataclass(slots=True)
class _Follower:
    """One request with a grammar."""

    grammar: OutputGrammar
    compiled: Future[CompiledGrammar]
    output_token_ids: list[int]
    """What the matcher has not taken yet."""
    matcher: Matcher | None = None
    """None until the first mask is wanted."""
    masks: NDArray[np.int32] | None = None
    """int32 [rows of the request, ceil(vocab_size / 32)] of this step; None: not asked for."""
    error: str | None = None
    """Why the request cannot go on."""


@dataclass(frozen=True, slots=True)
class Masked:
    """What `apply` found."""

    failed: dict[int, str] = field(default_factory=dict)
    """By row, why its request cannot go on."""
    done: frozenset[int] = frozenset()
    """Rows in which nothing but ends of sequence is left."""


class GrammarMasks:
    """The matchers of the requests in the batch. Costs nothing while none of them has a grammar."""

    def __init__(self, vocab_size: int, compiler: GrammarCompiler | None):
        """`compiler`: None where the config has no grammar plugin."""
        self._vocab_size = vocab_size
        self._row_size = -(-vocab_size // 32)
        self._compiler = compiler
        self.requests: dict[int, _Follower] = {}
        """By seq_id; only those with a grammar."""
        self._pool: ThreadPoolExecutor | None = None
        self._tasks: list[Future[None]] = []
        self._ends = np.zeros(self._row_size, np.int32)
        if compiler is not None:
            is_end = np.zeros(32 * self._row_size, np.bool_)
            is_end[list(compiler.setup.eos_token_ids)] = True
            self._ends = np.packbits(is_end, bitorder="little").view(np.int32)

    def add(self, request: NewRequest) -> None:
        """A request with a grammar comes, or comes back with its output so far. Raises `RequestError` where there is no
        plugin."""
        if self._compiler is None or request.grammar is None:
            raise RequestError(_NO_GRAMMAR)
        compiled = self._compiler.compile(request.grammar.spec)
        output = request.token_ids[request.num_prompt_tokens :]
        self.requests[request.seq_id] = _Follower(request.grammar, compiled, list(output))

    def remove(self, seq_id: int) -> None:
        """A request leaves, finished or preempted; unknown ones are passed over."""
        if self.requests:
            self._settle()
            self.requests.pop(seq_id, None)

    def start(self, wanted: Sequence[tuple[int, Paths]]) -> None:
        """Lets threads fill the masks of a step. `wanted`: the requests from which tokens are drawn, with the paths of
        their rows; those without a grammar are passed over."""
        work = [(self.requests[seq_id], paths) for seq_id, paths in wanted if seq_id in self.requests]
        if not work:
            return
        self._settle()  # of a step that failed in between
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, "dovetail-masks")
        parts = [work[at : at + _ROWS_OF_A_TASK] for at in range(0, len(work), _ROWS_OF_A_TASK)]
        self._tasks = [self._pool.submit(self._fill_all, part) for part in parts]

    def wants(self, seq_ids: Sequence[int]) -> bool:
        """Whether some of these requests have a grammar."""
        return bool(self.requests) and not self.requests.keys().isdisjoint(seq_ids)

    def apply(self, logits: Tensor, seq_ids: Sequence[int], paths: Paths | None) -> Masked:
        """Masks rows in place.

        Args:
            logits: float32 [M, vocab_size].
            seq_ids: the request of each row.
            paths: as for `Sampler.edited`. The rows of a request are in the order of its paths in `start`.
        """
        self._settle()
        failed: dict[int, str] = {}
        rows: list[int] = []
        masks: list[NDArray[np.int32]] = []
        num_seen: dict[int, int] = {}
        for row, seq_id in enumerate(seq_ids):
            follower = self.requests.get(seq_id)
            if follower is None:
                continue
            if follower.masks is None and follower.error is None:
                own = [i for i, other in enumerate(seq_ids) if other == seq_id]
                self._fill(follower, NO_DRAFT if paths is None else [paths[i] for i in own])
            if follower.error is not None or follower.masks is None:
                failed[row] = follower.error or ""
                continue
            ordinal = num_seen.get(seq_id, 0)
            num_seen[seq_id] = ordinal + 1
            rows.append(row)
            masks.append(follower.masks[ordinal])
        if not rows:
            return Masked(failed)
        legal = np.stack(masks)
        _mask(logits, rows, legal)
        is_done = np.flatnonzero(~(legal & ~self._ends).any(axis=1))
        return Masked(failed, frozenset(rows[index] for index in is_done.tolist()))

    def advance(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """More output of a request; those without a grammar are passed over. A request whose grammar does not take it
        fails with its next token."""
        follower = self.requests.get(seq_id)
        if follower is None:
            return
        follower.masks = None
        follower.output_token_ids += token_ids
        if follower.matcher is not None:
            self._catch_up(follower)

    def legal_nodes(self, seq_id: int, token_ids: Sequence[int], parents: Sequence[int]) -> list[int] | None:
        """Nodes of a draft whose paths are legal, in order; None for a request that has no grammar, or fails."""
        follower = self.requests.get(seq_id)
        matcher = None if follower is None else self._matcher(follower)
        if follower is None or matcher is None:
            return None
        paths: list[list[int]] = [[]]
        for token, parent in zip(token_ids, parents, strict=True):
            paths.append([*paths[parent + 1], token])
        try:
            walk = _Walk(matcher)
            legal = [node for node, path in enumerate(paths[1:]) if walk.go(path)]
            walk.go([])
        except Exception as error:
            follower.error = _message(error)
            return None
        return legal

    def forced(self, seq_id: int) -> tuple[int, ...]:
        """Tokens that come next whatever is drawn; none for a request that has no grammar, or fails."""
        follower = self.requests.get(seq_id)
        matcher = None if follower is None else self._matcher(follower)
        if follower is None or matcher is None:
            return ()
        try:
            return tuple(matcher.forced())
        except Exception as error:
            follower.error = _message(error)
            return ()

    def _settle(self) -> None:
        if self._tasks:
            wait(self._tasks)
            self._tasks = []

    def _fill_all(self, work: Sequence[tuple[_Follower, Paths]]) -> None:
        for follower, paths in work:
            self._fill(follower, paths)

    def _fill(self, follower: _Follower, paths: Paths) -> None:
        matcher = self._matcher(follower)
        if matcher is None:
            return
        masks = np.empty((len(paths), self._row_size), np.int32)
        try:
            walk = _Walk(matcher)
            for row, path in zip(masks, paths, strict=True):
                if walk.go(path):
                    matcher.fill_mask(row)
                else:
                    row[:] = -1  # behind a draft that is not accepted: nobody draws from it
            walk.go([])
        except Exception as error:  # a plugin's fault costs its request, and no other
            follower.error = _message(error)
        else:
            follower.masks = masks

    def _matcher(self, follower: _Follower) -> Matcher | None:
        """That of the request, which has taken its output; None where the request fails. Waits for the compilation."""
        if follower.matcher is None and follower.error is None:
            assert self._compiler is not None
            try:
                matcher = follower.compiled.result().start()
            except Exception as error:
                follower.error = _message(error)
                return None
            marker, setup = follower.grammar.starts_after, self._compiler.setup
            if marker:
                matcher = DelayedMatcher(matcher, marker, setup.vocab_size, setup.eos_token_ids)
            follower.matcher = matcher
            self._catch_up(follower)
        return follower.matcher if follower.error is None else None

    def _catch_up(self, follower: _Follower) -> None:
        assert follower.matcher is not None
        tokens, follower.output_token_ids = follower.output_token_ids, []
        try:
            taken = follower.matcher.advance(tokens)
        except Exception as error:
            follower.error = _message(error)
            return
        if taken < len(tokens) and follower.error is None:
            follower.error = f"the grammar does not take token {tokens[taken]}, which its own mask allowed"


class _Walk:
    """Takes a matcher from one path behind the last known token to the next, by what they do not share."""

    def __init__(self, matcher: Matcher):
        self._matcher = matcher
        self._path: list[int] = []

    def go(self, path: Sequence[int]) -> bool:
        """Whether the whole path is legal; the matcher is as far along it as it is."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        taken = self._matcher.advance(path[shared:]) if shared < len(path) else 0
        self._path = list(path[: shared + taken])
        return len(self._path) == len(path)


def _mask(logits: Tensor, rows: Sequence[int], legal: NDArray[np.int32]) -> None:
    """Minus infinity for tokens whose bit is 0. `legal`: int32 [len(rows), ceil(vocab_size / 32)]."""
    words = on_device(legal, logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_masked = ((words[:, :, None] >> bits) & 1).eq(0).flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.masked_fill_(is_masked, -torch.inf)
    else:
        index = on_device(np.array(rows, dtype=np.int64), logits.device)
        logits[index] = logits[index].masked_fill(is_masked, -torch.inf)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, RequestError) else f"the grammar failed: {type(error).__name__}: {error}"
