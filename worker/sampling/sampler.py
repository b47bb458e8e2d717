"""Sampler: from logits to tokens, for the rows that draw one and for the rows on which drafts are judged."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.logits import LogitsProcessor, LogitsRequest
from dovetail.contracts.operators import Operators
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.step import NewRequest, TokenLogprobs
from dovetail.nn.operators import torch_operators
from dovetail.nn.row_max import row_max
from dovetail.worker.sampling.logits_edits import EditRow, apply_edits
from dovetail.worker.sampling.logprobs import token_logprobs
from dovetail.worker.sampling.random_streams import DRAFT, uniforms
from dovetail.worker.sampling.row_draws import DrawNumbers, TargetRows, choose, gather_numbers, on_host, unusable
from dovetail.worker.sampling.sampling_state import (
    NO_LOGPROBS,
    ROW,
    LogitsEdits,
    RequestState,
    create_edits,
    fill_broken_row,
    fill_row,
    token_id_error,
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleOutput:
    """What one call drew. Dictionaries are keyed by row and usually empty."""

    token_ids: NDArray[np.int64]
    """[N]; -1 for rows that failed."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """For requests that want them."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Rows whose request cannot go on, with the message for its user."""


@dataclass(frozen=True)
class DeferredDraw:
    """What is needed to draw one token for each row of a step whose logits the host never looks at: the device draws,
    and the host hears of it later."""

    rows: NDArray[np.void]
    positions: NDArray[np.int64]
    vocab_size: int
    operators: Operators

    def gather(self, host: Tensor) -> DrawNumbers:
        """The numbers that `choose` takes, written to `host`: int64, with `numbers_room` of the rows."""
        return gather_numbers(self.rows, self.positions, self.vocab_size, host)

    def choose(self, logits: Tensor, numbers: DrawNumbers) -> tuple[Tensor, Tensor]:
        """The token of each row and its highest logit: int64 [N], float32 [N], on the device, where `numbers` are: a
        copy from the host here would wait for the whole forward pass."""
        tokens, highest = choose(logits, numbers, self.operators)
        return tokens, highest.float()

    def output(self, token_ids: NDArray[np.int64], highest: NDArray[np.float32]) -> SampleOutput:
        """What `choose` came to, once the host has it."""
        failed = unusable(highest)
        if failed:
            token_ids = token_ids.copy()
            token_ids[list(failed)] = -1
        return SampleOutput(token_ids, {}, failed)


class Sampler:
    """Keeps the sampling state of the requests in the batch and draws their tokens.

    Per request there is one row of numbers, written when it arrives; a step gathers rows and rebuilds nothing. The
    sampler follows the output of requests that need it (penalties, bad words, logits processors) by
    itself: what `sample` draws and what `commit` is told.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        processors: Mapping[str, LogitsProcessor] | None = None,
        operators: Operators | None = None,
    ):
        self.vocab_size = vocab_size
        self._operators = operators if operators is not None else torch_operators()
        self._processors = dict(processors or {})
        self._table = np.zeros(max_num_seqs, dtype=ROW)
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._requests: dict[int, RequestState] = {}
        self._special: set[int] = set()
        """Requests that ask for more than the most likely token of each row."""

    def add(self, request: NewRequest) -> None:
        """A request arrives, or comes back after a preemption with its output so far. Never fails: what cannot be
        served is reported when its first token is due."""
        slot, row = self._free[-1], self._table[self._free[-1]]
        edits: LogitsEdits | None = None
        wanted: tuple[str, ...] = ()
        try:
            error = token_id_error(request, self.vocab_size)
            if error is None:
                wanted, error = self._offer(request)
            if error is None:
                edits = create_edits(request, self.vocab_size, wanted)
                fill_row(row, request, self.vocab_size, has_edits=not edits.is_empty)
                if edits.is_empty and not request.sampling.min_tokens:
                    edits = None
        except (ArithmeticError, TypeError, ValueError) as fault:  # numbers that the table cannot hold, and the like
            error = f"the sampling parameters cannot be used: {fault}"
            edits = None
            for name in wanted:
                self._withdraw(name, request.key)
        if error is not None:
            fill_broken_row(row, self.vocab_size)
        self._free.pop()
        self._requests[request.key] = RequestState(slot, request.sampling, edits, error)
        if error is not None or edits is not None or row["temperature"] or row["logprobs"] != NO_LOGPROBS:
            self._special.add(request.key)

    def remove(self, key: int) -> None:
        """A request leaves, finished or preempted; unknown keys are passed over."""
        state = self._requests.pop(key, None)
        if state is None:
            return
        self._free.append(state.slot)
        self._special.discard(key)
        for name in state.edits.processors if state.edits is not None else ():
            self._withdraw(name, key)

    def sampling(self, key: int) -> SamplingParams:
        """The parameters of a request."""
        return self._requests[key].sampling

    def seeds(self, keys: Sequence[int]) -> NDArray[np.uint64]:
        """uint64 [len(keys)]: the seeds of requests, as `random_streams.uniforms` takes them."""
        return self._rows(keys)["seed"]

    def draft_uniforms(self, keys: Sequence[int], positions: NDArray[np.int64], count: int) -> NDArray[np.float64]:
        """float64 [len(keys), count]: streams for drafting in rounds whose first drafts stand at `positions`."""
        return uniforms(self.seeds(keys)[:, None], DRAFT, positions[:, None], np.arange(count))

    def commit(self, key: int, token_ids: Sequence[int]) -> None:
        """Tokens that stand and that `sample` did not draw: accepted drafts, and the token after them."""
        edits = self._requests[key].edits
        if edits is not None:
            for token in token_ids:
                edits.append(token)

    def defer(self, keys: Sequence[int], positions: NDArray[np.int64]) -> DeferredDraw | None:
        """The draw of a step, arguments as for `sample`, for logits that are not there yet; None where some request
        needs its logits or its last token on the host: for penalties, masks, processors, log probabilities."""
        rows = self._rows(keys)
        if (rows["has_edits"] | rows["is_broken"] | (rows["min_tokens"] > 0) | (rows["logprobs"] != NO_LOGPROBS)).any():
            return None
        return DeferredDraw(rows, positions, self.vocab_size, self._operators)

    def sample(self, logits: Tensor, keys: Sequence[int], positions: NDArray[np.int64]) -> SampleOutput:
        """Draws one token for each row.

        Args:
            logits: [N, vocab_size], any float type; left as they are.
            keys: the request of each row, no two alike.
            positions: int64 [N]: absolute position of the token to draw, which is the number of known tokens.
        """
        if not self._special and logits.shape == (len(keys), self.vocab_size):
            return _most_likely(logits)
        rows = self._rows(keys)
        edited, failed = self._edited(logits, rows, keys, positions, None)
        numbers = gather_numbers(rows, positions, self.vocab_size).on(logits.device)
        tokens, highest = choose(edited, numbers, self._operators)
        failed = unusable(on_host(highest)) | failed
        token_ids = tokens.cpu().numpy()
        if failed:
            token_ids[list(failed)] = -1
        for row in np.flatnonzero(rows["has_edits"] | (rows["min_tokens"] > 0)).tolist():
            if row not in failed:
                self.commit(keys[row], (int(token_ids[row]),))
        return SampleOutput(token_ids, self._logprobs(logits, rows, token_ids), failed)

    def target_rows(
        self,
        logits: Tensor,
        keys: Sequence[int],
        positions: NDArray[np.int64],
        paths: Sequence[Sequence[int]],
    ) -> TargetRows:
        """What each row says of the token that it predicts, after everything that `sample` does to it.

        Args:
            logits: [M, vocab_size], any float type; left as they are; the result reads them later.
            keys: the request of each row; a request has as many rows as it likes.
            positions: int64 [M]: absolute position of the token that the row predicts.
            paths: for each row, the drafts between the request's last known token and that position.
        """
        if not self._special and logits.shape == (len(keys), self.vocab_size):
            return TargetRows(logits, None, positions, self._operators, {})
        rows = self._rows(keys)
        edited, failed = self._edited(logits, rows, keys, positions, paths)
        return TargetRows(edited, rows, positions, self._operators, failed)

    def row_logprobs(
        self, logits: Tensor, rows: Sequence[int], key: int, token_ids: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Log probabilities of tokens that one request got, if it wants any; each is scored by its raw logits."""
        num_top = self._requests[key].sampling.logprobs
        if num_top is None:
            return []
        return token_logprobs(logits[list(rows)], np.array(token_ids, dtype=np.int64), num_top)

    def _rows(self, keys: Sequence[int]) -> NDArray[np.void]:
        requests = self._requests
        rows: NDArray[np.void] = self._table[[requests[key].slot for key in keys]]
        return rows

    def _edited(
        self,
        logits: Tensor,
        rows: NDArray[np.void],
        keys: Sequence[int],
        positions: NDArray[np.int64],
        paths: Sequence[Sequence[int]] | None,
    ) -> tuple[Tensor, dict[int, str]]:
        """Logits after masks, biases, penalties and processors (a copy if any is asked for), and rows that failed."""
        if logits.shape != (len(keys), self.vocab_size):
            expected = (len(keys), self.vocab_size)
            raise ValueError(f"logits have shape {tuple(logits.shape)}, the sampler was made for {expected}")
        num_output = positions - rows["num_prompt_tokens"]
        places = np.flatnonzero(rows["has_edits"] | (num_output < rows["min_tokens"]))
        failed: dict[int, str] = {}
        if rows["is_broken"].any():
            errors = ((row, self._requests[keys[row]].error) for row in np.flatnonzero(rows["is_broken"]).tolist())
            failed = {row: error for row, error in errors if error is not None}
        edit_rows = []
        for row in places.tolist():
            edits = self._requests[keys[row]].edits
            if edits is not None:
                path = paths[row] if paths is not None else ()
                edit_rows.append(EditRow(row, keys[row], edits, int(num_output[row]), path))
        if not edit_rows:
            return logits, failed
        _check_output_lengths(edit_rows)
        # A copy even where the dtype is right already: log probabilities are taken from the raw logits.
        edited = logits.to(torch.float32, copy=True).contiguous()
        return edited, failed | apply_edits(edited, edit_rows, self._processors)

    def _logprobs(
        self, logits: Tensor, rows: NDArray[np.void], token_ids: NDArray[np.int64]
    ) -> dict[int, TokenLogprobs]:
        places = np.flatnonzero((rows["logprobs"] != NO_LOGPROBS) & (token_ids >= 0))
        if not len(places):
            return {}
        wanted = logits if len(places) == len(rows) else logits[torch.from_numpy(places).to(logits.device)]
        entries = token_logprobs(wanted, token_ids[places], rows["logprobs"][places])
        return dict(zip(places.tolist(), entries, strict=True))

    def _offer(self, request: NewRequest) -> tuple[tuple[str, ...], str | None]:
        """Shows a new request to the processors: the names of those that want it, and what went wrong."""
        wanted: list[str] = []
        for name, processor in self._processors.items():
            options = request.sampling.processors.get(name)
            prompt = request.token_ids[: request.num_prompt_tokens]
            try:
                if processor.add_request(LogitsRequest(request.key, prompt, request.sampling, options)):
                    wanted.append(name)
            except Exception as error:  # a plugin's fault costs this request, not the batch
                for other in wanted:
                    self._withdraw(other, request.key)
                return (), f"logits processor {name!r} failed: {type(error).__name__}: {error}"
        return tuple(wanted), None

    def _withdraw(self, name: str, key: int) -> None:
        try:
            self._processors[name].remove_request(key)
        except Exception:  # the request is gone already; nobody is left to fail
            _logger.exception("logits processor %r failed to forget request %d", name, key)


def _most_likely(logits: Tensor) -> SampleOutput:
    """What `Sampler.sample` comes to where every request is greedy and wants nothing else."""
    highest, tokens = row_max(logits)
    token_ids, failed = tokens.cpu().numpy(), unusable(on_host(highest))
    if failed:
        token_ids[list(failed)] = -1
    return SampleOutput(token_ids, failed=failed)


def _check_output_lengths(rows: Sequence[EditRow]) -> None:
    """The sampler's own record of an output must be as long as the caller says that it is."""
    for row in rows:
        known = len(row.edits.output_token_ids) + len(row.path)
        if known != row.position:
            raise ValueError(
                f"request {row.key} draws output token {row.position}, but {known} were sampled or committed before it"
            )
