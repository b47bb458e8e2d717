"""Options of the whole suite."""

from __future__ import annotations

import gc
import importlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dovetail.config.schema import ComponentSection, EngineConfig
from dovetail.nn import native
from dovetail.testing.local_plugins import write_distribution

HOLDING = '''
"""Requests are held whose extra says so, as in {"held": "new"}, or whose id, as in "held-new": "new" before any step,
"begun" after the step of their first token (if they get it in the first step that they can)."""

from dovetail.contracts.hooks import hookimpl
from dovetail.contracts.telemetry import TelemetrySink

beginning = []


@hookimpl
def dovetail_request_added(request_id, params, control):
    when = params.extra.get("held", request_id.partition("held-")[2])
    if when == "new":
        control.hold(request_id)
    elif when == "begun":
        beginning.append((request_id, control))


class HoldsBegun(TelemetrySink):
    contract = (1, 0)

    def on_step(self, stats):
        if stats.first_tokens:
            while beginning:
                request_id, control = beginning.pop()
                control.hold(request_id)
'''
"""A plugin of somebody else. What a test does to a request that runs would come too late where the test is not
scheduled for a moment: the engine may be done with hundreds of tokens by then."""

MARKERS = ("nightly", "kernels", "browser", "ray")
"""Each is a target of the Makefile."""

# How long an example takes depends on what else the machine does.
settings.register_profile("dovetail", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dovetail")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--attention",
        default="auto",
        metavar="NAME",
        help="attention backend where neither a test nor its config names one (default: auto); tests about what auto "
        "chooses are left out then",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Otherwise the test that compiles first would find this among the warnings that it is about.
    logging.disable()
    native.announce_compiling()
    logging.disable(logging.NOTSET)
    config.addinivalue_line("markers", "chooses_attention: about the backend that `auto` chooses")
    name = config.getoption("--attention")
    if name != "auto":
        EngineConfig.model_fields["attention"].default = ComponentSection(name=name)
        EngineConfig.model_rebuild(force=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where tests of one marker were asked for, files that do not have it are not imported: it is a minute for all. A
    `conftest.py` in the folder may have it for a file, with a fixture's parameters."""
    marker = config.getoption("markexpr")
    if marker not in MARKERS or not collection_path.name.startswith("test_"):
        return None
    places = (folder / "conftest.py" for folder in (collection_path.parent, collection_path.parent.parent))
    files = [collection_path, *(place for place in places if place.exists())]
    return None if any(f"mark.{marker}" in file.read_text() for file in files) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--attention") != "auto":
        skip = pytest.mark.skip(reason="is about the backend that auto chooses, and --attention names one")
        for item in items:
            if item.get_closest_marker("chooses_attention"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays, so that collecting garbage need not look at it in each test anew,
    not even after a benchmark, which would unfreeze everything at its end."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


@pytest.fixture(scope="session")
def holding_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where HOLDING is installed, as hooks and sink `holding`."""
    site = tmp_path_factory.mktemp("holding")
    groups = {"hooks": "holding", "telemetry_sink": "holding:HoldsBegun"}
    points = {f"dovetail.{group}.v1": {"holding": reference} for group, reference in groups.items()}
    write_distribution(site, "holding", entry_points=points, modules={"holding.py": HOLDING})
    return site


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Imports a script of the repository by its name, with its neighbours importable as when it is run."""
    folder = str(Path(__file__).resolve().parents[1] / "scripts")

    def load(name: str) -> ModuleType:
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(folder)

    return load


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium, for tests marked `browser`."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.fail("these tests need Chromium on the PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
