"""Throw-away plugin distributions, on sys.path for one test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.registry import Registry
from dovetail.testing.local_plugins import write_distribution

SINK = """
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.telemetry import TelemetrySink

class Options(PluginOptions):
    path: str = "out.txt"
    every: int = 1

class Sink(TelemetrySink):
    "Writes what it is told."

    contract = (1, 0)
    Options = Options
"""


@pytest.fixture
def sink_source() -> str:
    """A module with a correct telemetry sink, `Sink`."""
    return SINK


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory at the front of sys.path. Modules imported from it are forgotten after the test."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    before = set(sys.modules)
    yield directory
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def install(site: Path) -> Callable[..., Registry]:
    """Writes a distribution into `site` (arguments of `write_distribution`) and returns a fresh registry."""

    def write(name: str, **parts: object) -> Registry:
        write_distribution(site, name, **parts)
        importlib.invalidate_caches()
        return Registry.scan()

    return write
