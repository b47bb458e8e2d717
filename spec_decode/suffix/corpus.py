"""A corpus on disk: documents whose continuations `suffix` guesses from, searchable by a request's last tokens.

The documents lie in one array of tokens. Beside it is a truncated suffix array (Manber and Myers 1993) of the reversed
text: all places, sorted by the `DEPTH` tokens before them, the last one first. So the places that end like a request
are neighbours, and a binary search finds them. Both are files in the user's cache folder, made once for a content and
a tokenizer, and mapped into memory: what is looked up is read, and the rest stays on disk.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.errors import ConfigError
from dovetail.nn.native.disk_cache import cache_directory, check_file, check_folder, make_private_folder
from dovetail.spec_decode.matching import MAX_MATCHES, NOTHING
from dovetail.spec_decode.suffix.documents import corpus_files, read_documents

DEPTH = 9
"""Tokens by which places are sorted: longer matches lie among those of this length."""
PAD = 4096
"""Empty entries around the text, so that windows over any place stay within it."""
_FORMAT = b"dovetail corpus 1"
_KEY_TOKENS = 3
_KEY_BITS = 21
"""Three tokens in one number; a vocabulary has fewer than 2**21 tokens."""
_TEXT, _PLACES, _KEYS = "text.npy", "places.npy", "keys.npy"


class Corpus:
    """Files of one corpus, mapped. Made by `open_corpus`.

    `text`: int32, the documents' tokens with `NOTHING` behind each document, and `PAD` times before and after all. By
    place in sorted order, one entry per token: its index in `text`, uint32 (`_places`), and the three tokens before it
    as one number, int64 (`_keys`).
    """

    def __init__(self, folder: Path):
        """Raises `OSError` and `ValueError` for files that are not there, or not whole."""
        self.text, self._places, self._keys = (
            np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in (_TEXT, _PLACES, _KEYS)
        )
        if len(self._places) != len(self._keys) or len(self.text) < 2 * PAD:
            raise ValueError("the files do not belong together")

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._places)

    def ends(self, suffix: NDArray[np.int32]) -> NDArray[np.int64]:
        """Indices in `text` after at most `MAX_MATCHES` places that end like `suffix`, in two tokens or more: those of
        the shortest match that so few places have. Ascending."""
        query = suffix[::-1].astype(np.int64)
        if len(query) < 2:
            return np.empty(0, dtype=np.int64)
        low, high = self._narrowed(query, 2, 0, len(self._places))
        for depth in range(3, min(len(query), DEPTH) + 1):
            if high - low <= MAX_MATCHES:
                break
            longer = self._narrowed(query, depth, low, high)
            if longer[0] == longer[1]:
                break
            low, high = longer
        return np.sort(self._places[max(low, high - MAX_MATCHES) : high].astype(np.int64))

    def _narrowed(self, query: NDArray[np.int64], depth: int, low: int, high: int) -> tuple[int, int]:
        """The neighbours of low .. high - 1 that agree in `depth` tokens, where these agree in all but the last."""
        if depth <= _KEY_TOKENS:
            first = _packed(query[:depth])
            span = 1 << (_KEY_BITS * (_KEY_TOKENS - depth))
            found = self._keys.searchsorted(np.array([first, first + span]))
            return int(found[0]), int(found[1])
        wanted = int(query[depth - 1])
        return (
            self._bisect(depth, low, high, wanted, is_upper=False),
            self._bisect(depth, low, high, wanted, is_upper=True),
        )

    def _bisect(self, depth: int, low: int, high: int, wanted: int, *, is_upper: bool) -> int:
        while low < high:
            middle = (low + high) // 2
            token = int(self.text[int(self._places[middle]) - depth])
            if token < wanted or (is_upper and token == wanted):
                low = middle + 1
            else:
                high = middle
        return low


def open_corpus(path: Path, tokenizer_json: str | None, vocab_size: int, max_tokens: int) -> Corpus:
    """The corpus of a file or folder; indexed if this content was not yet, for this tokenizer.

    Raises `ConfigError` for files that cannot be read as documents, for tokens outside the vocabulary, and for more
    than `max_tokens` tokens.
    """
    files = corpus_files(path)
    if vocab_size >= (1 << _KEY_BITS) - 1:
        raise ConfigError(f"a corpus serves vocabularies below {(1 << _KEY_BITS) - 1} tokens, not {vocab_size}")
    folder = cache_directory() / "corpora" / _content_hash(path, files, tokenizer_json, vocab_size)
    try:
        check_folder(folder)
        for name in (_TEXT, _PLACES, _KEYS):
            check_file(folder / name)
        corpus = Corpus(folder)
    except (FileNotFoundError, ValueError):
        _index(read_documents(path, files, tokenizer_json, vocab_size), path, max_tokens, folder)
        corpus = Corpus(folder)
    if len(corpus) > max_tokens:
        raise _too_long(path, max_tokens)
    return corpus


def _too_long(path: Path, max_tokens: int) -> ConfigError:
    return ConfigError(
        f"the corpus {path} has more than {max_tokens} tokens (max_corpus_tokens): raise it (indexing takes about 60"
        " bytes of memory per token, the index 16 on disk), or take a smaller corpus"
    )


def _content_hash(path: Path, files: Sequence[Path], tokenizer_json: str | None, vocab_size: int) -> str:
    found = hashlib.sha256(_FORMAT)
    found.update(hashlib.sha256((tokenizer_json or "").encode()).digest() + vocab_size.to_bytes(8, "little"))
    for file in files:
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").digest()
        found.update(file.suffix.encode() + b"\0" + content)
    return found.hexdigest()


def _index(documents: Iterator[NDArray[np.int32]], path: Path, max_tokens: int, folder: Path) -> None:
    """Writes the three files, each whole or not at all."""
    pad, parts, total = np.full(PAD, NOTHING, dtype=np.int32), [], 0
    for document in documents:
        total += len(document)
        if total > max_tokens:
            raise _too_long(path, max_tokens)
        parts += [document, np.array([NOTHING], dtype=np.int32)]
    if not total:
        raise ConfigError(f"the corpus {path} holds no token: give a file or folder with text")
    text = np.concatenate([pad, *parts, pad])
    places = np.flatnonzero(text != NOTHING) + 1
    # Three numbers of three tokens each; the last key is the one that sorts first.
    keys = [_packed(*(text[places - at].astype(np.int64) for at in range(first, first + 3))) for first in (7, 4, 1)]
    order = np.lexsort(keys)
    make_private_folder(folder)
    for name, array in ((_TEXT, text), (_PLACES, places[order].astype(np.uint32)), (_KEYS, keys[-1][order])):
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            try:
                _save(file, array)
                file.flush()
            except BaseException:
                os.unlink(file.name)
                raise
        os.replace(file.name, folder / name)


def _save(file: IO[bytes], array: NDArray[np.generic]) -> None:
    np.save(file, array, allow_pickle=False)


def _packed(*tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for up to three tokens, by which they sort like the tuple; `NOTHING` sorts first."""
    given = tokens[0] if len(tokens) == 1 else tokens
    key = np.zeros_like(given[0])
    for at in range(_KEY_TOKENS):
        key = key << _KEY_BITS
        if at < len(given):
            key = key | (given[at] + 1)
    return key
