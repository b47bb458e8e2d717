"""Conformance suite of hooks. A third party's test is a subclass::

    import my_package.hooks
    from dovetail.testing import HooksSuite

    class TestMyHooks(HooksSuite):
        plugin = my_package.hooks  # what the entry point names: a module, or an object

No engine runs: the hooks are called as an engine calls them, with a control that records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, ClassVar

import pluggy
import pytest

from dovetail.contracts import hooks as specs
from dovetail.contracts.sampling import SamplingParams
from dovetail.testing.side_effects import leaves_alone
from dovetail.testing.suite import Suite

PATIENCE_S = 10.0
"""After this time a hook counts as one that never returns."""
CONFIG: dict[str, Any] = {
    "model": {"path": "./model", "dtype": "float32"},
    "cache": {"block_size": 16, "num_blocks": 100},
    "telemetry": [],
    "speculative": None,
}
PLUGINS = {
    "executor": "dovetail.executors.cpu:CPUExecutor",
    "scheduler": "dovetail.schedulers.fcfs:FCFSScheduler",
    "attention": "/somewhere/mine.py:Mine",
}
ODD_IDS = ("0", "", "chatcmpl-6c1f", "a b/c", "ünïcode", "-1")
ODD_PARAMS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0, max_tokens=1),
    "several": SamplingParams(n=3, seed=7, logprobs=2, stop=["."]),
    "without a limit": SamplingParams(max_tokens=None),
    "with values for plugins": SamplingParams(extra={"tenant": "a", "deadline": 3.5, "other": {"nested": [1]}}),
}


class RecordedControl:
    """A `RequestControl` that keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def hold(self, request_ids: str | Iterable[str]) -> None:
        """Recorded."""
        self.calls.append(("hold", _ids(request_ids)))

    def resume(self, request_ids: str | Iterable[str]) -> None:
        """Recorded."""
        self.calls.append(("resume", _ids(request_ids)))


def _ids(request_ids: str | Iterable[str]) -> tuple[str, ...]:
    return (request_ids,) if isinstance(request_ids, str) else tuple(request_ids)


class HooksSuite(Suite):
    """Tests of every hook plugin."""

    kind: ClassVar[str] = "hooks"
    plugin: ClassVar[object]

    @pytest.fixture
    def manager(self) -> Iterator[pluggy.PluginManager]:
        """The plugin as the host registers it. An engine that still runs at the end of the test is stopped."""
        manager = pluggy.PluginManager(specs.PROJECT)
        manager.add_hookspecs(specs)
        manager.register(self.plugin, "tested")
        yield manager
        self._call(lambda: manager.hook.dovetail_engine_stopped())

    def test_implements_hooks(self, manager: pluggy.PluginManager) -> None:
        """At least one, and none that Dovetail does not have or cannot give what it takes."""
        manager.check_pending()
        assert manager.get_hookcallers(self.plugin), "no function is marked with hookimpl"

    def test_marks_every_hook(self, manager: pluggy.PluginManager) -> None:
        """A function with a hook's name that is not marked is never called."""
        marked = {caller.name for caller in manager.get_hookcallers(self.plugin) or ()}
        named = {name for name in dir(self.plugin) if name.startswith(f"{specs.PROJECT}_")}
        assert named <= marked, f"not marked with hookimpl: {', '.join(sorted(named - marked))}"

    def test_hears_an_engine_from_start_to_stop(self, manager: pluggy.PluginManager) -> None:
        """All hooks in their usual order."""
        self._run_engine(manager)

    def test_hears_one_engine_after_the_other(self, manager: pluggy.PluginManager) -> None:
        """A process may have several, also at the same time."""
        self._run_engine(manager)
        self._start(manager)
        self._run_engine(manager)
        self._call(lambda: manager.hook.dovetail_engine_stopped())

    def test_hears_the_stop_of_an_engine_that_never_started(self, manager: pluggy.PluginManager) -> None:
        """Its start failed behind the first hook, or before."""
        self._call(lambda: manager.hook.dovetail_engine_stopped())

    @pytest.mark.parametrize("params", ODD_PARAMS)
    def test_takes_every_request(self, manager: pluggy.PluginManager, params: str) -> None:
        """Whatever its sampling parameters, with and without values for plugins."""
        self._start(manager)
        self._add(manager, "1", ODD_PARAMS[params])

    @pytest.mark.parametrize("request_id", ODD_IDS)
    def test_takes_every_request_id(self, manager: pluggy.PluginManager, request_id: str) -> None:
        """Ids are any text, and come again after their request has ended."""
        self._start(manager)
        for _ in range(2):
            self._add(manager, request_id)

    def test_hears_every_version_of_the_weights(self, manager: pluggy.PluginManager) -> None:
        """Each version once, also where others heard of earlier ones."""
        self._start(manager)
        for version in (1, 2, 7):
            self._call(lambda version=version: manager.hook.dovetail_weights_changed(version=version))  # type: ignore[misc]

    def test_is_called_by_any_thread(self, manager: pluggy.PluginManager) -> None:
        """An async engine has a thread of its own, and requests are added by others."""
        self._start(manager)
        failed: list[BaseException] = []

        def add(number: int) -> None:
            try:
                self._add(manager, str(number))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, f"{failed}"

    def test_holds_only_requests_that_it_was_shown(self, manager: pluggy.PluginManager) -> None:
        """What a hook holds or resumes at once is a request of this engine."""
        control = self._start(manager)
        for number in range(4):
            self._add(manager, str(number), control=control)
        shown = {str(number) for number in range(4)}
        assert {request_id for _, ids in control.calls for request_id in ids} <= shown

    def test_leaves_alone_what_it_is_handed(self, manager: pluggy.PluginManager) -> None:
        """Others hear the same; random numbers of the process are not drawn."""
        config, plugins = deepcopy(CONFIG), dict(PLUGINS)
        with leaves_alone(config, plugins):
            self._start(manager, config, plugins)
            self._add(manager, "1")

    def test_leaves_no_thread_behind(self, manager: pluggy.PluginManager) -> None:
        """A process must end: threads that are no daemons end with the engine."""
        before = set(threading.enumerate())
        # In this thread, as threads inherit from the one that starts them whether they are daemons.
        control, hook = RecordedControl(), manager.hook
        hook.dovetail_engine_started(config=deepcopy(CONFIG), plugins=dict(PLUGINS), control=control)
        hook.dovetail_request_added(request_id="1", params=ODD_PARAMS["plain"], control=control)
        hook.dovetail_engine_stopped()
        left = [thread.name for thread in set(threading.enumerate()) - before if not thread.daemon]
        assert not left, f"threads that keep the process from ending: {left}"

    def _run_engine(self, manager: pluggy.PluginManager) -> None:
        self._start(manager)
        for number, params in enumerate(ODD_PARAMS.values()):
            self._add(manager, str(number), params)
        self._call(lambda: manager.hook.dovetail_weights_changed(version=1))
        self._add(manager, "again")
        self._call(lambda: manager.hook.dovetail_engine_stopped())

    def _start(
        self,
        manager: pluggy.PluginManager,
        config: dict[str, Any] | None = None,
        plugins: dict[str, str] | None = None,
    ) -> RecordedControl:
        control = RecordedControl()
        config = deepcopy(CONFIG) if config is None else config
        plugins = dict(PLUGINS) if plugins is None else plugins
        self._call(lambda: manager.hook.dovetail_engine_started(config=config, plugins=plugins, control=control))
        return control

    def _add(
        self,
        manager: pluggy.PluginManager,
        request_id: str,
        params: SamplingParams = ODD_PARAMS["plain"],
        control: RecordedControl | None = None,
    ) -> None:
        control = control or RecordedControl()
        self._call(lambda: manager.hook.dovetail_request_added(request_id=request_id, params=params, control=control))

    def _call(self, hook: Callable[[], list[Any]]) -> None:
        """Calls a hook as the engine does, and asserts that it returns, soon and nothing."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(hook())
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert outcome, f"the hook did not return in {PATIENCE_S:g} s, and the engine waits for it"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        # pluggy leaves out None.
        assert outcome[0] == [], f"the hook returned {outcome[0]}, which nobody reads"
