"""The header of a model, in one file or split over several."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

from dovetail.contracts.errors import ModelError
from dovetail.plugins.weight_formats.gguf.header import Header, read_header

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def model_header(path: Path) -> Header:
    """Of a file, or of the only model in a directory. Raises `ModelError`."""
    path = _file_of(path)
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return _read_parts(path, status.st_size, status.st_mtime_ns)


def _file_of(path: Path) -> Path:
    """The file, or the only or first file of a directory."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.gguf"))
    first = [p for p in found if (match := _SPLIT.fullmatch(p.name)) is None or int(match["number"]) == 1]
    if len(first) != 1:
        names = ", ".join(p.name for p in first) or "none"
        raise ModelError(f"{path} should hold one GGUF model, found {names}: give the path of the file")
    return first[0]


@functools.lru_cache(maxsize=2)
def _read_parts(path: Path, size: int, changed_ns: int) -> Header:
    """The header of `path` with the tensors of all files that the model is split over. Config, tokenizer and weights
    each ask for it, through instances of their own; size and time of change are there to tell a file that changed."""
    header = read_header(path)
    count = header.number("split.count") or 1
    if count <= 1:
        return header
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match["number"]) != 1:
        raise ModelError(
            f"{path} is one of {count} parts of a model: give the first, named ...-00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise ModelError(f"{path.parent} lacks {len(missing)} of {count} parts of the model: {', '.join(missing)}")
    rest = [tensor for part in paths for tensor in read_header(part).tensors]
    return replace(header, tensors=(*header.tensors, *rest))
