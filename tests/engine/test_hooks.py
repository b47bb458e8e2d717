"""Hook plugins listen; none of them can stop the engine or another plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.contracts.hooks import hookimpl
from dovetail.engine.hooks import HookCaller, create_hook_caller
from dovetail.registry import Registry
from dovetail.testing.local_plugins import write_distribution

HOOKS = "dovetail.hooks.v1"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Writes a distribution (arguments of `write_distribution`), and returns a registry that knows it."""

    def write(name: str, **parts: object) -> Registry:
        write_distribution(tmp_path, name, **parts)
        monkeypatch.syspath_prepend(tmp_path)
        return Registry.scan()

    return write


class Listener:
    def __init__(self):
        self.heard = []

    @hookimpl
    def dovetail_weights_changed(self, version):
        self.heard.append(version)


class Raising:
    def __init__(self):
        self.num_calls = 0

    @hookimpl
    def dovetail_weights_changed(self, version):
        self.num_calls += 1
        raise ValueError(f"version {version}")


def change(caller: HookCaller, version: int) -> None:
    caller.call("dovetail_weights_changed", version=version)


def test_a_hook_that_raises_is_reported_once_and_the_others_go_on(caplog):
    caller, raising, listeners = HookCaller(), Raising(), (Listener(), Listener())
    caller.register(listeners[0], "before")
    caller.register(raising, "noisy")
    caller.register(listeners[1], "after")
    with caplog.at_level(logging.WARNING):
        change(caller, 1)
        change(caller, 2)
    assert [listener.heard for listener in listeners] == [[1, 2], [1, 2]]
    assert raising.num_calls == 2
    [record] = caplog.records
    assert "noisy" in record.getMessage()
    assert "version 1" in record.getMessage()
    [failure] = caller.failures
    assert (failure.plugin, failure.hook) == ("noisy", "dovetail_weights_changed")


def test_an_installed_hook_plugin_is_called(install):
    source = (
        "from dovetail.contracts.hooks import hookimpl\n"
        "heard = []\n@hookimpl\ndef dovetail_engine_started(plugins):\n    heard.append(plugins)\n"
    )
    registry = install("acme", entry_points={HOOKS: {"audit": "acme_audit"}}, modules={"acme_audit.py": source})
    caller = create_hook_caller(registry)
    assert caller.plugins == ["acme:audit"]
    caller.call("dovetail_engine_started", config={}, plugins={"executor": "mine"}, control=None)
    import acme_audit

    assert acme_audit.heard == [{"executor": "mine"}]
    assert caller.listens("dovetail_engine_started")
    assert not caller.listens("dovetail_engine_stopped")


def test_broken_hook_plugins_cost_a_warning_each_and_nothing_else(install, caplog):
    marked = "from dovetail.contracts.hooks import hookimpl\n@hookimpl\ndef {}(): pass\n"
    modules = {
        "hooks_raise.py": "raise RuntimeError('no luck')",
        "hooks_typo.py": marked.format("dovetail_stepp_done"),
        "hooks_fine.py": marked.format("dovetail_engine_stopped"),
    }
    points = {name.removesuffix(".py"): name.removesuffix(".py") for name in modules}
    registry = install(
        "acme", entry_points={HOOKS: points, "dovetail.hooks.v2": {"later": "hooks_later"}}, modules=modules
    )
    with caplog.at_level(logging.WARNING):
        caller = create_hook_caller(registry)
    assert caller.plugins == ["acme:hooks_fine"]
    assert {failure.plugin for failure in caller.failures} == {"acme:hooks_raise", "acme:hooks_typo", "acme:later"}
    assert len(caplog.records) == 3


def test_a_hook_that_asks_for_an_unknown_argument_is_refused():
    class Curious:
        @hookimpl
        def dovetail_engine_stopped(self, engine):
            return None

    caller = HookCaller()
    with pytest.raises(PluginError, match="engine"):
        caller.register(Curious(), "curious")
    assert caller.plugins == []
