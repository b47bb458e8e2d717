"""Two vocabularies: which of a draft model's tokens the target has too, and how it reads the target's.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (arXiv 2502.05202), token-level intersection (TLI): the draft model draws among the tokens that both
have. What it draws from is a distribution over the target's tokens, so acceptance is as always.

The paper writes the text anew in the draft model's tokens. A drafter's pages have a slot for each of the target's
tokens, though, so here each of these is one input of the draft model: its own token of the same text, or else the mean
of the embeddings of the tokens that make up the text. That costs guesses, not correctness.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.nn.host_copies import on_device

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@dataclass(frozen=True)
class Vocabulary:
    """The texts of a model's tokens."""

    texts: Mapping[int, bytes]
    """By id, the bytes of ordinary tokens."""
    special: Mapping[int, str]
    """By id, the names of special tokens, which have no text."""


def read_vocabulary(tokenizer_json: str, size: int) -> Vocabulary:
    """The tokens below `size` of a tokenizer in the JSON form of the `tokenizers` library: byte-level BPE (GPT-2 and
    most after it), those with "▁" for a space and bytes as "<0x0A>" (SentencePiece), and others as they are
    written."""
    from tokenizers import Tokenizer  # slow to import, and few drafters need it

    tokenizer = Tokenizer.from_str(tokenizer_json)
    parts = json.loads(tokenizer_json)
    added = {one["id"]: one for one in parts.get("added_tokens") or ()}
    is_byte_level = "ByteLevel" in _kinds(parts.get("decoder")) | _kinds(parts.get("pre_tokenizer"))
    bytes_of = _byte_letters() if is_byte_level else {}
    texts: dict[int, bytes] = {}
    special: dict[int, str] = {}
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= size:
            continue
        if token_id in added:
            if added[token_id].get("special"):
                special[token_id] = token
            else:
                texts[token_id] = token.encode()
        elif is_byte_level and all(letter in bytes_of for letter in token):
            texts[token_id] = bytes(bytes_of[letter] for letter in token)
        else:
            texts[token_id] = _sentence_piece(token)
    return Vocabulary({token_id: text for token_id, text in texts.items() if text}, special)


def _kinds(part: Any) -> set[str]:
    """The types of a decoder or pre-tokenizer and of all within it."""
    if isinstance(part, Mapping):
        own = {str(part["type"])} if "type" in part else set()
        return own.union(*(_kinds(value) for value in part.values()))
    if isinstance(part, Sequence) and not isinstance(part, str):
        return set().union(*(_kinds(value) for value in part))
    return set()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: those that print are themselves, the others follow U+0100 in order."""
    others = iter(range(0x100, 0x200))
    return {chr(byte) if byte in _PRINTED else chr(next(others)): byte for byte in range(256)}


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()


class SharedTokens:
    """What two vocabularies have in common, and how the draft model reads the target's tokens."""

    def __init__(self, target: Vocabulary, own: Vocabulary, target_size: int, device: torch.device):
        """`target_size`: number of the target's token ids."""
        by_text = {text: token_id for token_id, text in sorted(own.texts.items(), reverse=True)}
        by_name = {name: token_id for token_id, name in own.special.items()}
        same = {token_id: by_text[text] for token_id, text in sorted(target.texts.items()) if text in by_text} | {
            token_id: by_name[name] for token_id, name in target.special.items() if name in by_name
        }
        pairs = sorted({own_id: token_id for token_id, own_id in reversed(same.items())}.items())
        self.own_ids = on_device(np.array([own_id for own_id, _ in pairs], dtype=np.int64), device)
        """int64 [S]: the draft model's ids of the tokens that both have."""
        self.target_ids = on_device(np.array([token_id for _, token_id in pairs], dtype=np.int64), device)
        """int64 [S]: the target's ids of the same."""
        texts = dict(target.texts) | {token_id: name.encode() for token_id, name in target.special.items()}
        pieces = [
            [same[token_id]] if token_id in same else split(texts.get(token_id, b""), by_text) or [0]
            for token_id in range(target_size)
        ]
        self._counts = np.array([len(ids) for ids in pieces], dtype=np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self._pieces = np.array([token_id for ids in pieces for token_id in ids], dtype=np.int64)

    @property
    def num_shared(self) -> int:
        """Tokens that both have."""
        return len(self.own_ids)

    def read(self, token_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For tokens of the target [T]: the draft model's tokens that make them up, flat, and how many each has
        [T]."""
        counts = self._counts[token_ids]
        ends = np.cumsum(counts)
        places = np.arange(ends[-1] if len(ends) else 0)
        places += np.repeat(self._starts[token_ids] - (ends - counts), counts)
        return self._pieces[places], counts


def split(text: bytes, tokens: Mapping[bytes, int]) -> list[int]:
    """Tokens that make up a text, the longest that fits each time; bytes that no token begins with are left out."""
    found, start = [], 0
    while start < len(text):
        end = next((end for end in range(len(text), start, -1) if text[start:end] in tokens), None)
        if end is not None:
            found.append(tokens[text[start:end]])
        start = start + 1 if end is None else end
    return found


def mean_rows(rows: torch.Tensor, counts: NDArray[np.int64]) -> torch.Tensor:
    """Means of rows [sum of counts, size] that follow each other, `counts` at a time: [len(counts), size]."""
    numbers = on_device(counts, rows.device)
    groups = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), numbers, output_size=len(rows))
    sums = torch.zeros(len(counts), rows.shape[1], dtype=torch.float32, device=rows.device)
    return (sums.index_add_(0, groups, rows.float()) / numbers[:, None]).to(rows.dtype)
