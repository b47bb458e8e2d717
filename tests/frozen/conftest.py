"""Installs the frozen plugins of 1.0 as a distribution, for the tests of this folder alone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM
from dovetail.registry import Registry
from dovetail.testing.local_plugins import write_distribution
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

SOURCES = Path(__file__).parent / "v1"
PACKAGE = "dovetail_frozen_v1"


def frozen_entry_points() -> dict[str, dict[str, str]]:
    """By group. Each module has the plugin of the kind that it is named for, as class `Frozen`; of hooks it is the
    module."""
    return {
        f"dovetail.{path.stem}.v1": {"frozen": f"{PACKAGE}.{path.stem}" + ("" if path.stem == "hooks" else ":Frozen")}
        for path in sorted(SOURCES.glob("*.py"))
    }


@pytest.fixture(scope="session")
def frozen_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the distribution is installed in."""
    site = tmp_path_factory.mktemp("frozen")
    modules = {f"{PACKAGE}/{path.name}": path.read_text() for path in SOURCES.glob("*.py")}
    modules[f"{PACKAGE}/__init__.py"] = ""
    write_distribution(site, "dovetail-frozen-v1", entry_points=frozen_entry_points(), modules=modules)
    return site


@pytest.fixture(scope="module")
def frozen(frozen_site: Path) -> Iterator[Registry]:
    """The registry of this process while the distribution is installed."""
    sys.path.insert(0, str(frozen_site))
    importlib.invalidate_caches()
    yield Registry.scan()
    sys.path.remove(str(frozen_site))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(directory, transformers model)."""
    directory = tmp_path_factory.mktemp("models") / "llama"
    return directory, save_tiny_model(directory, tiny_config("llama"))


@pytest.fixture
def run(frozen: Registry, tiny_llama: tuple[Path, Any]) -> Callable[..., LLM]:
    """Makes an `LLM` over the tiny Llama; keywords are sections of the config."""

    def make(**sections: Any) -> LLM:
        model = {"path": str(tiny_llama[0]), "tokenizer_mode": "none", "dtype": "float32"}
        own = {"model": model | sections.pop("model", {}), "cache": {"block_size": 4, "num_blocks": 200}}
        return LLM(**own, executor={"threads": 1} | sections.pop("executor", {}), **sections)

    return make


@pytest.fixture
def dovetail(frozen_site: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in a process that has the distribution."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(frozen_site), "TERM": "dumb"}
        command = [sys.executable, "-m", "dovetail", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=frozen_site)

    return call
