"""Lock files: JSON whose bytes follow from the lock alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dovetail.contracts.errors import ConfigError
from dovetail.engine.locking.lock import Lock

MARK = "dovetail_lock"
VERSION = 1


def check_target(path: str | Path) -> None:
    """Raises `ConfigError` where a file exists that a lock would overwrite and that is none: a config, most likely. An
    empty file and an older lock are overwritten."""
    target = Path(path)
    if not target.is_file() or target.stat().st_size == 0:
        return
    try:
        data: Any = json.loads(target.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data = None
    if not isinstance(data, Mapping) or MARK not in data:
        raise ConfigError(f"{path} exists and is no lock: name another file with --out, or delete this one")


def write_lock(lock: Lock, path: str | Path) -> None:
    """Writes a lock file. Equal locks give equal bytes. Raises `ConfigError` where it cannot be written, and for a file
    that exists and is no lock."""
    check_target(path)
    text = json.dumps({MARK: VERSION, **asdict(lock)}, indent=1, sort_keys=True, ensure_ascii=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"the lock cannot be written to {path}: {error}") from error


def read_lock(path: str | Path) -> Lock:
    """Reads what `write_lock` wrote. Raises `ConfigError` for a file that is missing, or none of its version."""
    again = "write it again with `dovetail lock CONFIG --out FILE`"
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"lock {path} does not exist (looked in {Path(path).absolute().parent}): {again}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"lock {path} cannot be read ({error}): {again}") from error
    if not isinstance(data, Mapping) or MARK not in data:
        raise ConfigError(f"{path} is no lock: {again}")
    if data[MARK] != VERSION:
        raise ConfigError(f"{path} is a lock of format {data[MARK]!r}, this Dovetail reads {VERSION}: {again}")
    try:
        return TypeAdapter(Lock).validate_python({key: value for key, value in data.items() if key != MARK})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"lock {path} is malformed at '{place}': {first['msg']}; {again}") from error
