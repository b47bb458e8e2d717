"""Sampler: from logits to tokens and log probabilities; the one entry to sampling.

logits [N, vocab_size]
  -> edits     grammars, masks, biases, penalties and logits processors, for requests that ask for them
  -> draw      the most likely token of greedy rows; temperature, min_p, top_k, top_p and a draw for others
       <- streams    one random number per row, a function of seed and position
  -> SampleOutput: token ids, log probabilities (`logprobs`), failures
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor
from dovetail.contracts.operators import Operators
from dovetail.contracts.sampling import PROCESSED_LOGPROBS, SamplingParams
from dovetail.contracts.step import NewRequest, TokenLogprobs
from dovetail.nn.host_copies import on_device
from dovetail.nn.operators import torch_operators
from dovetail.nn.row_max import row_max
from dovetail.worker.sampling.draw import BatchParams, DrawParams, draw_tokens
from dovetail.worker.sampling.edits import Edits
from dovetail.worker.sampling.grammar_compiler import GrammarCompiler
from dovetail.worker.sampling.grammar_masks import GrammarMasks, Paths
from dovetail.worker.sampling.logprobs import processed_logprobs, token_logprobs
from dovetail.worker.sampling.streams import UInt64Array

NOTHING_LEFT = (
    "no token is left to sample: structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias and logits "
    "processors together mask the whole vocabulary; relax one of them"
)
NOT_FINITE = "the model's logits hold NaN or infinity; its weights may be damaged, or overflow in this dtype"


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What one call drew. Dictionaries are keyed by row and usually empty."""

    token_ids: NDArray[np.int64]
    """[N]; -1 for rows that failed."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """For requests that want them."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Rows whose request cannot go on, with the message for its user."""


@dataclass(frozen=True, slots=True)
class _Request:
    slot: int
    """In `BatchParams`."""
    sampling: SamplingParams


class Sampler:
    """Keeps the sampling state of the requests in the batch and draws their tokens.

    The sampler follows the output of requests that need it (penalties, bad words, logits processors) by itself: what
    `sample` draws and what `commit` reports.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        processors: Mapping[str, LogitsProcessor] | None = None,
        operators: Operators | None = None,
        grammars: GrammarCompiler | None = None,
    ):
        """`grammars`: what compiles those of requests; None where the config has no grammar plugin."""
        self.vocab_size = vocab_size
        self.operators = operators if operators is not None else torch_operators()
        self._params = BatchParams.empty(max_num_seqs, vocab_size)
        self.grammars = GrammarMasks(vocab_size, grammars)
        self._edits = Edits(vocab_size, dict(processors or {}), self.grammars)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._requests: dict[int, _Request] = {}
        # By seq_id, only requests that are not plain greedy ones: a step of greedy requests looks at empty containers.
        self._drawn: set[int] = set()
        self._num_logprobs: dict[int, int] = {}
        self._processed: set[int] = set()
        """Of these, requests whose log probabilities are those of the distribution that is drawn from."""
        self._errors: dict[int, str] = {}
        """Why requests cannot be served; reported when their first token is due."""

    def add(self, request: NewRequest) -> None:
        """A request arrives, or comes back after a preemption with its output so far. Never fails: what cannot be
        served is reported when its first token is due."""
        seq_id, sampling, slot = request.seq_id, request.sampling, self._free_slots.pop()
        self._requests[seq_id] = _Request(slot, sampling)
        try:
            self._edits.add(request)
            self._params.put(slot, sampling, request.seed)
        except RequestError as error:
            self._errors[seq_id] = str(error)
            return
        except (ArithmeticError, TypeError, ValueError) as error:  # numbers that the arrays cannot hold, and the like
            self._errors[seq_id] = f"the sampling parameters cannot be used: {error}"
            self._edits.remove(seq_id)
            return
        if not sampling.is_greedy:
            self._drawn.add(seq_id)
        if sampling.logprobs is not None:
            self._num_logprobs[seq_id] = sampling.logprobs
            if sampling.logprobs_mode == PROCESSED_LOGPROBS:
                self._processed.add(seq_id)

    def remove(self, seq_id: int) -> None:
        """A request leaves, finished or preempted; unknown ones are passed over."""
        request = self._requests.pop(seq_id, None)
        if request is not None:
            self._free_slots.append(request.slot)
            self._drawn.discard(seq_id)
            self._num_logprobs.pop(seq_id, None)
            self._processed.discard(seq_id)
            self._errors.pop(seq_id, None)
            self._edits.remove(seq_id)

    def sampling(self, seq_id: int) -> SamplingParams:
        """The parameters of a request."""
        return self._requests[seq_id].sampling

    def seeds(self, seq_ids: Sequence[int]) -> UInt64Array:
        """uint64 [len(seq_ids)]: the seeds of requests, as `streams.uniforms` takes them."""
        return self._params.seed[self._slots(seq_ids)]

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Output that `sample` did not draw."""
        self._edits.append(seq_id, token_ids)

    def sample(self, logits: Tensor, seq_ids: Sequence[int], positions: NDArray[np.int64]) -> SampleOutput:
        """Draws one token for each row.

        Args:
            logits: [N, vocab_size], any float type; left as they are.
            seq_ids: the request of each row, no two alike.
            positions: int64 [N]: absolute position of the token to draw, which is the number of known tokens.
        """
        edited, failed = self.edited(logits, seq_ids, positions)
        params = self.draw_params(seq_ids, positions)
        tokens, highest = self.draw(edited, None if params is None else params.on(logits.device))
        output = sample_output(tokens.cpu().numpy(), highest.cpu().numpy(), failed)
        if self._edits.is_idle and not self._num_logprobs:
            return output
        for row, seq_id in enumerate(seq_ids):
            if row not in output.failed:
                self._edits.append(seq_id, (int(output.token_ids[row]),))
        return SampleOutput(output.token_ids, self._logprobs(logits, edited, seq_ids, output), output.failed)

    def can_defer(self, seq_ids: Sequence[int]) -> bool:
        """Whether the device can draw the next tokens, with `draw_params`, `draw` and `sample_output`: no request needs
        its logits or its last token on the host, for masks, penalties, processors or log probabilities."""
        on_host = (self._num_logprobs.keys(), self._errors.keys())
        return not (self._edits.concern(seq_ids) or any(each and not each.isdisjoint(seq_ids) for each in on_host))

    def start_masks(self, wanted: Sequence[tuple[int, Paths]]) -> None:
        """Lets threads fill the masks of grammars while the logits are computed: the requests from which tokens are
        drawn, each with the paths of its rows (`edited`). Without this call `edited` fills them."""
        self.grammars.start(wanted)

    def draw_params(
        self, seq_ids: Sequence[int], positions: NDArray[np.int64] | None, memory: Tensor | None = None
    ) -> DrawParams | None:
        """What `draw` needs of a step's rows, on the host; None where all are greedy. Arguments as for `edited` and
        `BatchParams.gather`."""
        return self._params.gather(self._slots(seq_ids), positions, memory) if self._drawn else None

    def draw(self, logits: Tensor, params: DrawParams | None) -> tuple[Tensor, Tensor]:
        """The token of each row and its highest logit: int64 [N], float32 [N], on the device of `logits` and `params`.
        With `params` on the device nothing is copied from the host."""
        highest, tokens = row_max(logits)
        if params is not None:
            tokens = draw_tokens(logits, tokens, params, self.operators)
        return tokens, highest.float()

    def edited(
        self,
        logits: Tensor,
        seq_ids: Sequence[int],
        positions: NDArray[np.int64],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, dict[int, str]]:
        """Logits after everything that requests do to them before temperature (a copy if that is anything), and by row
        the message for the user of a request that cannot go on.

        Args:
            logits: [M, vocab_size], any float type; left as they are.
            seq_ids: the request of each row; a request has as many rows as it likes.
            positions: int64 [M]: absolute position of the token that the row predicts.
            paths: for each row, the tokens between the request's last known one and that position; None: none.
        """
        if logits.shape != (len(seq_ids), self.vocab_size):
            expected = (len(seq_ids), self.vocab_size)
            raise ValueError(f"logits have shape {tuple(logits.shape)}, the sampler was made for {expected}")
        failed = {}
        if self._errors:
            failed = {row: self._errors[seq_id] for row, seq_id in enumerate(seq_ids) if seq_id in self._errors}
        if self._edits.is_idle:
            return logits, failed
        edited, errors = self._edits.apply(logits, seq_ids, positions, paths)
        return edited, failed | errors

    def row_logprobs(
        self, logits: Tensor, edited: Tensor, rows: Sequence[int], seq_id: int, token_ids: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Log probabilities of tokens that one request got, one in each of `rows`, if it wants any.

        Args:
            logits: [M, vocab_size], raw.
            edited: the same after `edited`.
            rows: of both.
            seq_id: the request.
            token_ids: what it got.
        """
        num_top = self._num_logprobs.get(seq_id)
        if num_top is None:
            return []
        tokens = np.array(token_ids, dtype=np.int64)
        if seq_id not in self._processed:
            return token_logprobs(logits[list(rows)], tokens, num_top)
        params = self.draw_params([seq_id] * len(rows), None)
        return processed_logprobs(edited[list(rows)], params, tokens, num_top)

    def _slots(self, seq_ids: Sequence[int]) -> NDArray[np.int64]:
        requests = self._requests
        return np.array([requests[seq_id].slot for seq_id in seq_ids], dtype=np.int64)

    def _logprobs(
        self, logits: Tensor, edited: Tensor, seq_ids: Sequence[int], output: SampleOutput
    ) -> dict[int, TokenLogprobs]:
        counts = self._num_logprobs
        rows = [row for row, seq_id in enumerate(seq_ids) if seq_id in counts and row not in output.failed]
        if not self._processed:
            return self._raw(logits, seq_ids, rows, output.token_ids)
        processed = [row for row in rows if seq_ids[row] in self._processed]
        raw = [row for row in rows if seq_ids[row] not in self._processed]
        found = self._raw(logits, seq_ids, raw, output.token_ids)
        if processed:
            indices, tokens = np.array(processed, dtype=np.int64), output.token_ids[processed]
            own = [seq_ids[row] for row in processed]
            num_top = np.array([counts[seq_id] for seq_id in own], dtype=np.int64)
            selected = edited[on_device(indices, edited.device)]
            entries = processed_logprobs(selected, self.draw_params(own, None), tokens, num_top)
            found |= zip(processed, entries, strict=True)
        return found

    def _raw(
        self, logits: Tensor, seq_ids: Sequence[int], rows: Sequence[int], token_ids: NDArray[np.int64]
    ) -> dict[int, TokenLogprobs]:
        if not rows:
            return {}
        indices = np.array(rows, dtype=np.int64)
        wanted = logits if len(rows) == len(seq_ids) else logits[on_device(indices, logits.device)]
        num_top = np.array([self._num_logprobs[seq_ids[row]] for row in rows], dtype=np.int64)
        return dict(zip(rows, token_logprobs(wanted, token_ids[indices], num_top), strict=True))


def sample_output(
    token_ids: NDArray[np.int64], highest: NDArray[np.float32], failed: Mapping[int, str] | None = None
) -> SampleOutput:
    """What was drawn, once the host has it: arrays [N] of `Sampler.draw`, and by row what failed before."""
    failures = unusable(highest)
    if failed:
        failures |= failed
    if failures:
        token_ids = token_ids.copy()
        token_ids[list(failures)] = -1
    return SampleOutput(token_ids, failed=failures)


def unusable(highest: NDArray[np.float32]) -> dict[int, str]:
    """Rows from which nothing can be drawn, by their highest logit, with the reason."""
    is_finite = np.isfinite(highest)
    if is_finite.all():
        return {}
    return {int(row): NOTHING_LEFT if highest[row] == -np.inf else NOT_FINITE for row in np.flatnonzero(~is_finite)}
