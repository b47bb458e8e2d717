"""The output file: whole lines only, whatever ends the process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.batch.lines import INVALID_LINE


@dataclass(frozen=True)
class Written:
    """What a file of answers has."""

    answered: frozenset[str]
    """custom_ids of answers with status 200."""
    failed: frozenset[str]
    """custom_ids of the other lines."""


class OutputFile:
    """Appends lines, each by one write."""

    def __init__(self, path: Path, descriptor: int):
        self._path, self._descriptor = path, descriptor

    def append(self, line: bytes) -> None:
        """Writes a line that ends with a newline. Raises `DovetailError` where the disk refuses it."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise DovetailError(
                f"--output {self._path}: cannot be written ({error.strerror}); make room, and go on with --resume"
            ) from None


@contextmanager
def open_output(path: Path) -> Iterator[OutputFile]:
    """The file, for appending. Raises `ConfigError` where it cannot be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror}); give another path") from None
    try:
        yield OutputFile(path, descriptor)
    finally:
        os.close(descriptor)


def read_output(path: Path, *, drop_failed: bool) -> Written:
    """What a file has from an earlier run; a last line that a crash cut off is taken away, and so are those of invalid
    input lines, since the input is read again and may have been corrected.

    `drop_failed`: takes away the lines of failed requests too. The file is replaced as a whole, if at all. Raises
    `ConfigError` for a whole line that is no answer: then this is another file.
    """
    raw = path.read_bytes()
    kept: list[bytes] = []
    answered: set[str] = set()
    failed: set[str] = set()
    # Behind the last newline is nothing, or a line that was cut off.
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        if not line.strip():
            continue
        record = _record(line, path, number)
        is_answered = (record["response"] or {}).get("status_code") == 200
        if _is_of_invalid_line(record) or (drop_failed and not is_answered):
            continue
        (answered if is_answered else failed).add(record["custom_id"])
        kept.append(line + b"\n")
    if (data := b"".join(kept)) != raw:
        _replace(path, data)
    return Written(frozenset(answered), frozenset(failed - answered))


def _record(line: bytes, path: Path, number: int) -> Mapping[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = None
    is_answer = isinstance(record, dict) and isinstance(record.get("custom_id"), str) and "response" in record
    if not is_answer and not _is_of_invalid_line(record):
        raise ConfigError(
            f"--output {path}:{number} is no line of a batch's output: give the file of an earlier run, or another path"
        )
    return record


def _is_of_invalid_line(record: Any) -> bool:
    error = record.get("error") if isinstance(record, dict) else None
    return isinstance(error, dict) and error.get("code") == INVALID_LINE


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(data)
    os.replace(new, path)
