"""Reading a corpus: documents of text, which the target's tokenizer cuts up, or token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dovetail.contracts.errors import ConfigError

TEXT = (".txt", ".md")
"""Files that are one document."""
LINES = ".jsonl"
"""Files with a document per line: an object with the text as its `text`."""
IDS = ".npy"
"""Files of numpy's with token ids: integers in one dimension, -1 between documents."""


def against(path: Path, has_tokenizer: bool) -> list[str]:
    """Returns the reasons why `path` cannot be read, judged by its name and without reading it."""
    if path.suffix not in (*TEXT, LINES, IDS):
        return [f"{path} is no corpus: name a file that ends in {', '.join(TEXT)}, {LINES} or {IDS}"]
    if not path.is_file():
        return [f"the corpus {path} is no file here; set the option `path`"]
    if path.suffix != IDS and not has_tokenizer:
        return [f"the corpus {path} is text, and the model has no tokenizer: give token ids, in a file {IDS}"]
    return []


def read_documents(path: Path, tokenizer_json: str | None) -> list[NDArray[np.int32]]:
    """Returns the token ids of each document. Raises `ConfigError` where the file is not what its name says."""
    if path.suffix == IDS:
        return _read_ids(path)
    assert tokenizer_json is not None, "`against` was asked before"
    texts = _read_lines(path) if path.suffix == LINES else [_text(path)]
    encoded = Tokenizer.from_str(tokenizer_json).encode_batch(texts, add_special_tokens=False)
    return [np.array(one.ids, dtype=np.int32) for one in encoded]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error}") from error


def _read_ids(path: Path) -> list[NDArray[np.int32]]:
    try:
        ids = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ConfigError(f"{path} holds no token ids: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(f"{path} holds {ids.dtype} {list(ids.shape)}; a corpus is integers in one dimension")
    most = np.iinfo(np.int32).max
    if len(ids) and (int(ids.min()) < -1 or int(ids.max()) > most):
        raise ConfigError(
            f"{path} has {int(ids.min())} to {int(ids.max())}; token ids are 0 to {most}, and -1 ends one"
        )
    ends = np.flatnonzero(ids == -1)
    return [part[part != -1].astype(np.int32) for part in np.split(ids, ends)]


def _read_lines(path: Path) -> Sequence[str]:
    texts = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}, line {number}: a document is an object with `text`") from error
        if not isinstance(texts[-1], str):
            raise ConfigError(f"{path}, line {number}: `text` is no string")
    return texts
