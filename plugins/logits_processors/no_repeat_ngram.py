"""No n-gram twice: Hugging Face's `no_repeat_ngram_size`, per request.

SamplingParams(processors={"no_repeat_ngram": 3})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsProcessor, LogitsRequest, LogitsRow, LogitsSetup
from dovetail.contracts.plugin import PluginOptions


class NoRepeatNgramOptions(PluginOptions):
    """What holds for requests that say nothing."""

    size: int | None = Field(default=None, ge=1)
    """n for requests that give none; None leaves them alone."""


@dataclass
class _History:
    """Prompt and output of one request."""

    size: int
    tokens: NDArray[np.int64]
    """Known tokens, then unused entries."""
    num_prompt_tokens: int
    num_settled: int = 0
    """Output tokens that are final; those after them may have been drafts."""


class NoRepeatNgram(LogitsProcessor):
    """Masks every token that would repeat an n-gram of the request's prompt and output."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options = NoRepeatNgramOptions
    options: NoRepeatNgramOptions

    def __init__(self, options: NoRepeatNgramOptions, setup: LogitsSetup):
        super().__init__(options, setup)
        self._histories: dict[int, _History] = {}

    def validate(self, options: Any) -> None:
        is_size = isinstance(options, int) and not isinstance(options, bool) and options >= 1
        if options is not None and not is_size:
            raise RequestError(
                f"processors['no_repeat_ngram'] must be the n of the n-grams, at least 1, got {options!r}"
            )

    def add_request(self, request: LogitsRequest) -> bool:
        size = request.options if request.options is not None else self.options.size
        if size is None:
            return False
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int64)
        self._histories[request.seq_id] = _History(size, prompt, len(prompt))
        return True

    def remove_request(self, seq_id: int) -> None:
        del self._histories[seq_id]

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        shortest: dict[int, int] = {}
        for index, row in enumerate(rows):
            history, output = self._histories[row.seq_id], row.output_token_ids
            banned = _repeated(_with_output(history, output), history.size)
            logits[index, torch.from_numpy(banned).to(logits.device)] = -torch.inf
            shortest[row.seq_id] = min(len(output), shortest.get(row.seq_id, len(output)))
        # Rows of one request differ by their drafts; what the shortest holds will not change any more.
        for seq_id, length in shortest.items():
            self._histories[seq_id].num_settled = length


def _with_output(history: _History, output: Sequence[int]) -> NDArray[np.int64]:
    """Prompt and output as one array; only what is not settled is written anew."""
    end = history.num_prompt_tokens + len(output)
    if end > len(history.tokens):
        history.tokens = np.concatenate([history.tokens, np.zeros(end, dtype=np.int64)])
    history.tokens[history.num_prompt_tokens + history.num_settled : end] = output[history.num_settled :]
    return history.tokens[:end]


def _repeated(tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Tokens that followed an earlier occurrence of the last `size` - 1 tokens."""
    followers = tokens[size - 1 :]
    matches = np.ones(len(followers), dtype=np.bool_)
    prefix = tokens[len(tokens) - size + 1 :]
    for offset, token in enumerate(prefix):
        matches &= tokens[offset : offset + len(followers)] == token
    return followers[matches]
