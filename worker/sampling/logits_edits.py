"""What stands between raw logits and temperature: masks, biases, penalties and logits processors, in this order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.logits import LogitsProcessor, LogitsRow
from dovetail.worker.sampling.sampling_state import LogitsEdits

_MASKED = -torch.inf


@dataclass(frozen=True, slots=True)
class EditRow:
    """One row of logits whose request wants it changed."""

    index: int
    """Row in the logits."""
    key: int
    edits: LogitsEdits
    position: int
    """Number of output tokens before the one that the row predicts, drafts included."""
    path: Sequence[int]
    """Drafts that lead to the row."""

    def output_token_ids(self) -> list[int]:
        """The output that the row follows; not to be changed."""
        return [*self.edits.output_token_ids, *self.path] if self.path else self.edits.output_token_ids


def apply_edits(logits: Tensor, rows: Sequence[EditRow], processors: Mapping[str, LogitsProcessor]) -> dict[int, str]:
    """Changes `logits` (float32 [n, vocab_size], contiguous) in place.

    Returns:
        For rows whose processor failed, by index into `logits`, the message for the request's user.
    """
    flat = logits.view(-1)
    _mask_allowed(logits, rows)
    _mask_tokens(flat, logits.shape[1], rows)
    _add_biases(flat, logits.shape[1], rows)
    _penalize(flat, logits.shape[1], rows)
    failed: dict[int, str] = {}
    for name, processor in processors.items():
        wanting = [row for row in rows if name in row.edits.processors and row.index not in failed]
        if wanting:
            failed |= _run_processor(logits, wanting, name, processor)
    return failed


def _mask_allowed(logits: Tensor, rows: Sequence[EditRow]) -> None:
    for row in rows:
        if row.edits.allowed is not None:
            allowed = torch.from_numpy(row.edits.allowed).to(logits.device)
            logits[row.index].masked_fill_(~allowed, _MASKED)


def _mask_tokens(flat: Tensor, vocab_size: int, rows: Sequence[EditRow]) -> None:
    """Bad words whose last token would come next, and ends before `min_tokens`."""
    places: list[NDArray[np.int64]] = []
    for row in rows:
        start = row.index * vocab_size
        if row.position < row.edits.sampling.min_tokens:
            places.append(row.edits.forbidden_ends + start)
        if row.edits.bad_words:
            places.append(np.array(_last_tokens(row), dtype=np.int64) + start)
    if places:
        flat.index_fill_(0, _on_device(np.concatenate(places), flat), _MASKED)


def _last_tokens(row: EditRow) -> list[int]:
    """Tokens that would complete a bad word after the row's output."""
    longest = max(len(word) for word in row.edits.bad_words) - 1
    known = [*row.edits.output_token_ids[-longest:], *row.path] if longest else []
    return [word[-1] for word in row.edits.bad_words if len(word) == 1 or tuple(known[1 - len(word) :]) == word[:-1]]


def _add_biases(flat: Tensor, vocab_size: int, rows: Sequence[EditRow]) -> None:
    biased = [row for row in rows if len(row.edits.bias_ids)]
    if biased:
        places = np.concatenate([row.edits.bias_ids + row.index * vocab_size for row in biased])
        biases = np.concatenate([row.edits.biases for row in biased])
        flat.index_add_(0, _on_device(places, flat), _on_device(biases, flat))


def _penalize(flat: Tensor, vocab_size: int, rows: Sequence[EditRow]) -> None:
    """Repetition penalty over prompt and output, then frequency and presence penalties over the output."""
    places: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.float32]] = []
    penalties: list[tuple[float, float, float]] = []
    for row in rows:
        if row.edits.seen is not None:
            token_ids, count = row.edits.seen.counts(row.path)
            places.append(token_ids + row.index * vocab_size)
            counts.append(count)
            sampling = row.edits.sampling
            penalties.append((sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty))
    if not places:
        return
    per_token = np.repeat(np.array(penalties, dtype=np.float32), [len(place) for place in places], axis=0)
    repetition, frequency, presence = _on_device(per_token, flat).unbind(1)
    index, count_ = _on_device(np.concatenate(places), flat), _on_device(np.concatenate(counts), flat)
    scores = flat[index]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    flat[index] = scores - frequency * count_ - presence * (count_ > 0)


def _run_processor(logits: Tensor, rows: Sequence[EditRow], name: str, processor: LogitsProcessor) -> dict[int, str]:
    """Shows one processor a copy of its rows, so that one that fails leaves nothing half-done behind."""
    index = torch.tensor([row.index for row in rows], device=logits.device)
    shown = logits[index]
    try:
        returned: object = processor.apply(shown, [LogitsRow(row.key, row.output_token_ids()) for row in rows])
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
    return torch.from_numpy(array).to(like.device, non_blocking=True)
