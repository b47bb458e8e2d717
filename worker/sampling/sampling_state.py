"""What the sampler keeps per request: one row of numbers each, and more only for requests that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.step import NewRequest
from dovetail.worker.sampling.random_streams import seed_word

NO_LOGPROBS = -2
"""In the table, for requests that want no log probabilities; -1 stands for the whole vocabulary."""

ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("num_prompt_tokens", np.int64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),
        ("has_edits", np.bool_),
        ("is_broken", np.bool_),
    ],
    align=True,
)
"""One request's parameters; `top_k` is the vocabulary's size where all tokens are kept."""


class SeenTokens:
    """The distinct tokens of one request's prompt and output, and how often each stands in the output.

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
        """Token ids and counts as they stand once the tokens of `path` follow: int64 [n], float32 [n]."""
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


@dataclass
class LogitsEdits:
    """What is done to the logits of one request before temperature."""

    sampling: SamplingParams
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
    def is_empty(self) -> bool:
        """Whether nothing is done besides masking ends."""
        return not (self.bad_words or self.allowed is not None or len(self.bias_ids) or self.seen or self.processors)

    def append(self, token_id: int) -> None:
        """One more output token."""
        self.output_token_ids.append(token_id)
        if self.seen is not None:
            self.seen.append(token_id)


@dataclass
class RequestState:
    """One request in the sampler."""

    slot: int
    sampling: SamplingParams
    edits: LogitsEdits | None
    """None where logits are taken as they are."""
    error: str | None
    """Why the request cannot be served; reported when its first token is due."""


def token_id_error(request: NewRequest, vocab_size: int) -> str | None:
    """What is wrong with the token ids that the request's parameters name; None if nothing is."""
    sampling = request.sampling
    named = {
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": sampling.logit_bias or (),
        "bad_words": [token for word in request.bad_word_ids for token in word],
    }
    for name, token_ids in named.items():
        for token in token_ids:
            if not 0 <= token < vocab_size:
                return f"{name} names token id {token}, but the model's vocabulary ends at {vocab_size - 1}"
    return None


def create_edits(request: NewRequest, vocab_size: int, processors: tuple[str, ...]) -> LogitsEdits:
    """Prepares what `request` does to logits; its token ids are known to lie in the vocabulary."""
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
    return LogitsEdits(
        sampling=sampling,
        forbidden_ends=np.array(sorted(ends), dtype=np.int64),
        bad_words=tuple(word for word in request.bad_word_ids if word),
        allowed=allowed,
        bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
        biases=np.fromiter(bias.values(), np.float32, len(bias)),
        seen=SeenTokens(prompt, output) if is_penalized else None,
        processors=processors,
        output_token_ids=output,
    )


def fill_row(row: np.void, request: NewRequest, vocab_size: int, *, has_edits: bool) -> None:
    """Writes the request's parameters into its row of the table."""
    sampling = request.sampling
    row["temperature"] = sampling.temperature
    row["min_p"] = sampling.min_p
    row["top_p"] = sampling.top_p
    row["top_k"] = sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size
    row["seed"] = seed_word(request.seed)
    row["num_prompt_tokens"] = request.num_prompt_tokens
    row["min_tokens"] = sampling.min_tokens
    row["logprobs"] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
    row["has_edits"] = has_edits
    row["is_broken"] = False


def fill_broken_row(row: np.void, vocab_size: int) -> None:
    """Writes a row for a request that cannot be served: greedy, and what it draws is thrown away."""
    for name in ROW.names or ():
        row[name] = 0
    row["top_p"], row["top_k"], row["logprobs"] = 1.0, vocab_size, NO_LOGPROBS
    row["is_broken"] = True
