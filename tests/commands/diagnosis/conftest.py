"""Distributions with faults, on sys.path for the tests of one module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail.commands.installed import Diagnosis, diagnose
from dovetail.registry import Registry


@contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """Puts folders in front of sys.path."""
    sys.path[:0] = map(str, folders)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(str(folder))
        importlib.invalidate_caches()


@pytest.fixture
def examine(tmp_path: Path) -> Callable[..., Diagnosis]:
    """Examines plugins with `tmp_path`, or the folders given, on sys.path."""

    def run(*names: str, folders: tuple[Path, ...] = (), timeout_s: float = 60.0) -> Diagnosis:
        with on_path(*(folders or (tmp_path,))):
            return diagnose(Registry.scan(), names, timeout_s=timeout_s)

    return run
