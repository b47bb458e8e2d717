"""The documents of a corpus, as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.errors import ConfigError

TEXTS = (".txt", ".md")
_SUFFIXES = (*TEXTS, ".jsonl", ".npy")
_Encode = Callable[[str], list[int]]
_PIECE = 1 << 16
"""Characters of a text that are tokenized at once, to the end of their line."""


def corpus_files(path: Path) -> list[Path]:
    """The file, or those below a folder that can be read, in order of name. Raises `ConfigError`."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    else:
        files = [path] if path.is_file() and path.suffix in _SUFFIXES else []
    if not files:
        raise ConfigError(
            f"the corpus {path} is no file of kind {', '.join(_SUFFIXES)}, and no folder that holds one: give text,"
            ' lines of JSON ({"text": ...} or {"token_ids": [...]}), or numpy arrays of token ids'
        )
    return files


def needs_tokenizer(files: Sequence[Path]) -> bool:
    """Whether some of the files hold text. Lines of JSON are looked at up to the first that is one."""
    return any(file.suffix in TEXTS or (file.suffix == ".jsonl" and _has_text(file)) for file in files)


def _has_text(file: Path) -> bool:
    with file.open("rb") as lines:
        return any(_is_text(line.lstrip()) for line in lines)


def _is_text(line: bytes) -> bool:
    """False for a line that is no document: reading it reports that."""
    if line.startswith(b'"'):
        return True
    if not line.startswith(b"{") or line.startswith(b'{"token_ids"'):
        return False
    try:
        document = json.loads(line)
    except ValueError:
        return False
    return "token_ids" not in document and isinstance(document.get("text"), str)


def read_documents(
    path: Path, files: Sequence[Path], tokenizer_json: str | None, vocab_size: int
) -> Iterator[NDArray[np.int32]]:
    """Token ids of each document, none empty. Raises `ConfigError` that names the file, and the line."""
    encode = _encoder(path, tokenizer_json)
    for file in files:
        try:
            documents = _documents_of(file, encode)
            for where, tokens in documents:
                if len(tokens):
                    yield _checked(tokens, where, vocab_size)
        except (OSError, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the corpus file {file} cannot be read: {error}") from error


def _encoder(path: Path, tokenizer_json: str | None) -> _Encode:
    if tokenizer_json is None:

        def refuse(text: str) -> list[int]:
            raise ConfigError(f"the corpus {path} holds text, and the model has no tokenizer: give token ids")

        return refuse
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _documents_of(file: Path, encode: _Encode) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".npy":
        yield str(file), np.load(file, allow_pickle=False)
    elif file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{file}, line {number}"
                    yield where, _of_line(json.loads(line), where, encode)
    else:
        with file.open(encoding="utf-8") as opened:
            tokens: list[int] = []
            while piece := opened.read(_PIECE):
                tokens += encode(piece + opened.readline())
        yield str(file), tokens


def _of_line(given: Any, where: str, encode: _Encode) -> Any:
    if isinstance(given, dict):
        given = given["token_ids"] if "token_ids" in given else given.get("text")
    if isinstance(given, str):
        return encode(given)
    if isinstance(given, list):
        return given
    raise ConfigError(f'{where}: expected a text, a list of token ids, or an object with "text" or "token_ids"')


def _checked(tokens: Any, where: str, vocab_size: int) -> NDArray[np.int32]:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"{where}: token ids are a flat list of integers")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigError(
            f"{where}: token ids must be at least 0 and below {vocab_size}, the target's vocabulary; were they made by"
            " another tokenizer?"
        )
    return ids.astype(np.int32)
