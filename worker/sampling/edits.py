"""What changes logits before temperature, in this order:

    1. structured_outputs           tokens that the grammar does not allow are masked
    2. allowed_token_ids            all other tokens are masked
    3. bad_words, min_tokens        tokens that would complete a bad word, or end the output too early, are masked; but
                                    for ends where the grammar allows nothing else
    4. logit_bias                   added
    5. repetition_penalty           over prompt and output; then frequency_penalty and presence_penalty over the output
    6. logits processors            in the order of the config

vLLM has the same order, but runs custom processors between 4 and 5, so that penalties change what they return. min_p,
a processor in vLLM, comes after temperature in both: see `draw`. Where a request has several rows, each is edited with
the tokens that lead to it from the last known one counted as output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor, LogitsRequest, LogitsRow
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.step import NewRequest
from dovetail.nn.host_copies import on_device
from dovetail.worker.sampling.grammar_masks import GrammarMasks, Masked

_logger = logging.getLogger(__name__)
_MASKED = -torch.inf


class SeenTokens:
    """The distinct tokens of one request's prompt and output, and how often each occurs in the output.

    Penalties change only these entries of a row of logits, so neither masks nor counts of the vocabulary's size
    are kept.
    """

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]):
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._size = len(distinct)
        self._token_ids = np.concatenate([distinct, np.zeros(64, dtype=np.int64)])
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        self._index = {token: i for i, token in enumerate(distinct.tolist())}
        for token in output_token_ids:
            self.append(token)

    def append(self, token_id: int) -> None:
        """One more output token."""
        index = self._index.get(token_id)
        if index is None:
            index = self._size
            if index == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._index[token_id] = index
            self._token_ids[index] = token_id
            self._size += 1
        self._counts[index] += 1

    def counts(self, path: Sequence[int] = ()) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids and counts once the tokens of `path` follow: int64 [n], float32 [n]."""
        token_ids, counts = self._token_ids[: self._size], self._counts[: self._size]
        if not path:
            return token_ids, counts
        counts = counts.copy()
        unseen: dict[int, int] = {}
        for token in path:
            index = self._index.get(token)
            if index is None:
                unseen[token] = unseen.get(token, 0) + 1
            else:
                counts[index] += 1
        token_ids = np.concatenate([token_ids, np.fromiter(unseen.keys(), np.int64, len(unseen))])
        return token_ids, np.concatenate([counts, np.fromiter(unseen.values(), np.float32, len(unseen))])


@dataclass(slots=True)
class RequestEdits:
    """What one request does to its logits."""

    sampling: SamplingParams
    num_prompt_tokens: int
    forbidden_ends: NDArray[np.int64]
    """End-of-sequence and stop tokens, masked while `min_tokens` is not reached."""
    bad_words: tuple[tuple[int, ...], ...]
    allowed: NDArray[np.bool_] | None
    """Mask over the vocabulary."""
    bias_ids: NDArray[np.int64]
    biases: NDArray[np.float32]
    seen: SeenTokens | None
    """Only where a penalty is asked for."""
    processors: tuple[str, ...]
    """Logits processors that want this request's rows."""
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def only_ends(self) -> bool:
        """Whether nothing is done besides masking ends."""
        return not (self.bad_words or self.allowed is not None or len(self.bias_ids) or self.seen or self.processors)


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of logits that is changed."""

    index: int
    """Row in the logits."""
    seq_id: int
    edits: RequestEdits
    position: int
    """Number of output tokens before the one that the row predicts, those of `path` included."""
    path: Sequence[int]
    """Tokens behind the last known one that lead to the row."""

    def output_token_ids(self) -> list[int]:
        """The output that the row follows; the caller's to keep."""
        return [*self.edits.output_token_ids, *self.path]


class Edits:
    """The edits of the requests in the batch, which follow the output of these requests."""

    def __init__(self, vocab_size: int, processors: Mapping[str, LogitsProcessor], grammars: GrammarMasks):
        self._vocab_size = vocab_size
        self._processors = processors
        self.grammars = grammars
        self.requests: dict[int, RequestEdits] = {}
        """By seq_id; only requests that change logits by other things than a grammar."""

    @property
    def is_idle(self) -> bool:
        """Whether no request changes its logits."""
        return not (self.requests or self.grammars.requests)

    def concern(self, seq_ids: Sequence[int]) -> bool:
        """Whether some of these requests change their logits."""
        return (bool(self.requests) and not self.requests.keys().isdisjoint(seq_ids)) or self.grammars.wants(seq_ids)

    def add(self, request: NewRequest) -> None:
        """A request arrives, or comes back after a preemption with its output so far.

        Raises `RequestError` for token ids outside the vocabulary and for a logits processor that fails, and whatever
        Python raises for parameters of another type.
        """
        _check_token_ids(request, self._vocab_size)
        processors = self._offer(request)
        try:
            edits = _create_edits(request, self._vocab_size, processors)
        except Exception:
            self._withdraw(processors, request.seq_id)
            raise
        if request.grammar is not None:
            try:
                self.grammars.add(request)
            except Exception:
                self._withdraw(processors, request.seq_id)
                raise
        if not edits.only_ends or request.sampling.min_tokens:
            self.requests[request.seq_id] = edits

    def remove(self, seq_id: int) -> None:
        """A request leaves, finished or preempted; unknown ones are passed over."""
        self.grammars.remove(seq_id)
        edits = self.requests.pop(seq_id, None)
        if edits is not None:
            self._withdraw(edits.processors, seq_id)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """More output of a request."""
        self.grammars.advance(seq_id, token_ids)
        edits = self.requests.get(seq_id)
        if edits is None:
            return
        edits.output_token_ids += token_ids
        if edits.seen is not None:
            for token in token_ids:
                edits.seen.append(token)

    def apply(
        self,
        logits: Tensor,
        seq_ids: Sequence[int],
        positions: NDArray[np.int64],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, dict[int, str]]:
        """All edits of a step; arguments as for `Sampler.edited`.

        Returns:
            The logits, a float32 copy if any row is changed; and by row, the message for the request's user where a
            logits processor or the grammar failed. Raises ValueError if the record of an output has another length than
            the caller's.
        """
        rows = self._rows(seq_ids, positions, paths)
        has_grammars = self.grammars.wants(seq_ids)
        if not rows and not has_grammars:
            return logits, {}
        # A copy even where the dtype is right already: log probabilities are taken from the raw logits.
        edited = logits.to(torch.float32, copy=True).contiguous()
        masked = self.grammars.apply(edited, seq_ids, paths) if has_grammars else Masked()
        _mask_all_but_allowed(edited, rows)
        _mask_tokens(edited, rows, masked.done)
        _add_biases(edited, rows)
        _penalize(edited, rows)
        failed = dict(masked.failed)
        for name, processor in self._processors.items():
            shown = [row for row in rows if name in row.edits.processors and row.index not in failed]
            if shown:
                failed |= _run_processor(edited, shown, name, processor)
        return edited, failed

    def _rows(
        self, seq_ids: Sequence[int], positions: NDArray[np.int64], paths: Sequence[Sequence[int]] | None
    ) -> list[_Row]:
        rows = []
        for index, seq_id in enumerate(seq_ids):
            edits = self.requests.get(seq_id)
            if edits is None:
                continue
            position = int(positions[index]) - edits.num_prompt_tokens
            if edits.only_ends and position >= edits.sampling.min_tokens:
                continue
            path = paths[index] if paths is not None else ()
            known = len(edits.output_token_ids) + len(path)
            if known != position:
                raise ValueError(
                    f"request {seq_id} draws output token {position}, but {known} were sampled or committed before it"
                )
            rows.append(_Row(index, seq_id, edits, position, path))
        return rows

    def _offer(self, request: NewRequest) -> tuple[str, ...]:
        """Shows a new request to the processors: the names of those that want it."""
        wanted: list[str] = []
        for name, processor in self._processors.items():
            options = request.sampling.processors.get(name)
            prompt = request.token_ids[: request.num_prompt_tokens]
            try:
                if processor.add_request(LogitsRequest(request.seq_id, prompt, request.sampling, options)):
                    wanted.append(name)
            except Exception as error:  # a plugin's fault costs this request, not the batch
                self._withdraw(wanted, request.seq_id)
                raise RequestError(f"logits processor {name!r} failed: {type(error).__name__}: {error}") from error
        return tuple(wanted)

    def _withdraw(self, names: Sequence[str], seq_id: int) -> None:
        for name in names:
            try:
                self._processors[name].remove_request(seq_id)
            except Exception:  # the request is gone already; nobody is left to fail
                _logger.exception("logits processor %r failed to forget request %d", name, seq_id)


def _check_token_ids(request: NewRequest, vocab_size: int) -> None:
    sampling = request.sampling
    named = {
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": sampling.logit_bias or (),
        "bad_words": [token for word in request.bad_word_ids for token in word],
    }
    for name, token_ids in named.items():
        for token in token_ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} names token id {token}, but the model's vocabulary ends at {vocab_size - 1}"
                )


def _create_edits(request: NewRequest, vocab_size: int, processors: tuple[str, ...]) -> RequestEdits:
    sampling = request.sampling
    prompt = request.token_ids[: request.num_prompt_tokens]
    output = request.token_ids[request.num_prompt_tokens :]
    allowed = None
    if sampling.allowed_token_ids is not None:
        allowed = np.zeros(vocab_size, dtype=np.bool_)
        allowed[list(sampling.allowed_token_ids)] = True
    # An end token outside the vocabulary can never be drawn, so there is nothing to mask.
    ends = {token for token in (*request.eos_token_ids, *sampling.stop_token_ids) if 0 <= token < vocab_size}
    bias = sampling.logit_bias or {}
    is_penalized = (
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )
    return RequestEdits(
        sampling=sampling,
        num_prompt_tokens=request.num_prompt_tokens,
        forbidden_ends=np.array(sorted(ends), dtype=np.int64),
        bad_words=tuple(word for word in request.bad_word_ids if word),
        allowed=allowed,
        bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
        biases=np.fromiter(bias.values(), np.float32, len(bias)),
        seen=SeenTokens(prompt, output) if is_penalized else None,
        processors=processors,
        output_token_ids=output,
    )


def _mask_all_but_allowed(logits: Tensor, rows: Sequence[_Row]) -> None:
    for row in rows:
        if row.edits.allowed is not None:
            allowed = on_device(row.edits.allowed, logits.device)
            logits[row.index].masked_fill_(~allowed, _MASKED)


def _mask_tokens(logits: Tensor, rows: Sequence[_Row], done: Set[int]) -> None:
    """Bad words whose last token would come next, and ends before `min_tokens`, but in the rows of `done`."""
    early = [row for row in rows if row.position < row.edits.sampling.min_tokens and row.index not in done]
    masked = [(row, row.edits.forbidden_ends) for row in early]
    masked += [(row, np.array(_last_tokens(row), dtype=np.int64)) for row in rows if row.edits.bad_words]
    if masked:
        logits.view(-1).index_fill_(0, _flat_index(logits, masked), _MASKED)


def _last_tokens(row: _Row) -> list[int]:
    """Tokens that would complete a bad word after the row's output."""
    longest = max(len(word) for word in row.edits.bad_words) - 1
    known = [*row.edits.output_token_ids[-longest:], *row.path] if longest else []
    return [word[-1] for word in row.edits.bad_words if len(word) == 1 or tuple(known[1 - len(word) :]) == word[:-1]]


def _add_biases(logits: Tensor, rows: Sequence[_Row]) -> None:
    biased = [row for row in rows if len(row.edits.bias_ids)]
    if biased:
        index = _flat_index(logits, [(row, row.edits.bias_ids) for row in biased])
        biases = np.concatenate([row.edits.biases for row in biased])
        logits.view(-1).index_add_(0, index, _on_device(biases, logits))


def _penalize(logits: Tensor, rows: Sequence[_Row]) -> None:
    """Repetition penalty over prompt and output, then frequency and presence penalties over the output."""
    seen = [(row, *row.edits.seen.counts(row.path)) for row in rows if row.edits.seen is not None]
    if not seen:
        return
    index = _flat_index(logits, [(row, token_ids) for row, token_ids, _ in seen])
    counts = _on_device(np.concatenate([counts for _, _, counts in seen]), logits)
    of_rows = [row.edits.sampling for row, _, _ in seen]
    penalties = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in of_rows], np.float32)
    of_tokens = np.repeat(penalties, [len(token_ids) for _, token_ids, _ in seen], axis=0)
    repetition, frequency, presence = _on_device(of_tokens, logits).unbind(1)
    flat = logits.view(-1)
    scores = flat[index]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    flat[index] = scores - frequency * counts - presence * (counts > 0)


def _flat_index(logits: Tensor, tokens: Sequence[tuple[_Row, NDArray[np.int64]]]) -> Tensor:
    """int64 [n]: where tokens of rows are in `logits.view(-1)`."""
    vocab_size = logits.shape[1]
    return _on_device(np.concatenate([token_ids + row.index * vocab_size for row, token_ids in tokens]), logits)


def _run_processor(logits: Tensor, rows: Sequence[_Row], name: str, processor: LogitsProcessor) -> dict[int, str]:
    """Shows one processor a copy of its rows, so that one that fails leaves nothing half done."""
    index = on_device(np.array([row.index for row in rows], dtype=np.int64), logits.device)
    shown = logits[index]
    try:
        returned: object = processor.apply(shown, [LogitsRow(row.seq_id, row.output_token_ids()) for row in rows])
    except Exception as error:  # whatever a plugin raises concerns the requests that it was shown, and no other
        fault: str | None = f"{type(error).__name__}: {error}"
    else:
        fault = _misuse(shown, returned, (len(rows), logits.shape[1]), logits)
    if fault is not None:
        return {row.index: f"logits processor {name!r} failed: {fault}" for row in rows}
    logits[index] = shown
    return {}


def _misuse(shown: Tensor, returned: object, shape: tuple[int, int], like: Tensor) -> str | None:
    """What a processor did other than to change its logits in place; None if nothing."""
    if returned is not None and returned is not shown:
        return f"it returned a {type(returned).__name__}; it must change the logits that it is given in place"
    if tuple(shown.shape) != shape:
        return f"it gave its logits the shape {tuple(shown.shape)}, and they are {shape}; change them in place"
    if (shown.dtype, shown.device, shown.layout) != (like.dtype, like.device, like.layout):
        return f"it made its logits {shown.dtype} on {shown.device}; they are {like.dtype} on {like.device}"
    return None


def _on_device(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return on_device(array, like.device)
