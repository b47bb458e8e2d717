"""What the suite of hooks finds: each a change in a plugin that passes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.contracts.hooks import RequestControl, hookimpl
from dovetail.contracts.sampling import SamplingParams
from dovetail.testing import hooks_suite
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.hooks_suite import HooksSuite


class Counts:
    """Counts requests by tenant, and holds those of one."""

    def __init__(self) -> None:
        self.tenants: dict[str, int] = {}
        self.version = 0

    @hookimpl
    def dovetail_engine_started(self, config: dict[str, Any], control: RequestControl) -> None:
        self.block_size = config["cache"]["block_size"]

    @hookimpl
    def dovetail_request_added(self, request_id: str, params: SamplingParams, control: RequestControl) -> None:
        tenant = str(params.extra.get("tenant"))
        self.tenants[tenant] = self.tenants.get(tenant, 0) + 1
        if tenant == "a":
            control.hold(request_id)
            control.resume([request_id])

    @hookimpl
    def dovetail_weights_changed(self, version: int) -> None:
        self.version = version

    @hookimpl
    def dovetail_engine_stopped(self) -> None:
        self.tenants.clear()


class TestCounts(HooksSuite):
    plugin = Counts()


class Silent:
    pass


class Misspelt(Counts):
    @hookimpl
    def dovetail_request_add(self, request_id: str) -> None:
        pass


class TakesMore(Counts):
    @hookimpl
    def dovetail_request_added(self, request_id: str, prompt: str) -> None:
        pass


class Unmarked(Counts):
    def dovetail_weights_changed(self, version: int) -> None:
        self.version = version


class NeedsATenant(Counts):
    @hookimpl
    def dovetail_request_added(self, request_id: str, params: SamplingParams) -> None:
        self.tenants[params.extra["tenant"]] = 1


class NumbersIds(Counts):
    @hookimpl
    def dovetail_request_added(self, request_id: str) -> None:
        self.tenants[str(int(request_id))] = 1


class EachIdOnce(Counts):
    @hookimpl
    def dovetail_request_added(self, request_id: str) -> None:
        assert request_id not in self.tenants
        self.tenants[request_id] = 1


class CountsVersions(Counts):
    @hookimpl
    def dovetail_weights_changed(self, version: int) -> None:
        assert version == self.version + 1
        self.version = version


class OneEngineOnly(Counts):
    @hookimpl
    def dovetail_engine_started(self) -> None:
        assert not hasattr(self, "engine")
        self.engine = object()


class StopsWhatStarted(Counts):
    @hookimpl
    def dovetail_engine_stopped(self) -> None:
        del self.block_size


class EditsTheConfig(Counts):
    @hookimpl
    def dovetail_engine_started(self, config: dict[str, Any]) -> None:
        config["cache"]["block_size"] = 32


class Draws(Counts):
    @hookimpl
    def dovetail_request_added(self, request_id: str) -> None:
        self.chosen = random.random() < 0.5


class Answers(Counts):
    @hookimpl
    def dovetail_request_added(self, request_id: str) -> bool:  # type: ignore[override]
        return False


class HoldsOthers(Counts):
    @hookimpl
    def dovetail_request_added(self, request_id: str, control: RequestControl) -> None:
        control.hold(f"{request_id}-0")


class OneThreadOnly(Counts):
    @hookimpl
    def dovetail_engine_started(self) -> None:
        self.owner = threading.current_thread()

    @hookimpl
    def dovetail_request_added(self, request_id: str) -> None:
        assert threading.current_thread() is self.owner


class Waits(Counts):
    event = threading.Event()

    @hookimpl
    def dovetail_engine_stopped(self) -> None:
        self.event.wait()


class LeavesAThread(Counts):
    event = threading.Event()

    @hookimpl
    def dovetail_engine_started(self) -> None:
        threading.Thread(target=self.event.wait).start()


FAULTS = [
    Fault("implements no hook", Silent, "test_implements_hooks"),
    Fault("misspells a hook", Misspelt, "test_implements_hooks"),
    Fault("takes what no hook gives", TakesMore, "test_implements_hooks"),
    Fault("does not mark a hook", Unmarked, "test_marks_every_hook"),
    Fault("needs values that few requests have", NeedsATenant, "test_takes_every_request"),
    Fault("takes ids for numbers", NumbersIds, "test_takes_every_request_id"),
    Fault("takes each id once", EachIdOnce, "test_takes_every_request_id"),
    Fault("expects every version of the weights", CountsVersions, "test_hears_every_version_of_the_weights"),
    Fault("serves one engine only", OneEngineOnly, "test_hears_one_engine_after_the_other"),
    Fault("stops what never started", StopsWhatStarted, "test_hears_the_stop_of_an_engine_that_never_started"),
    Fault("edits the config", EditsTheConfig, "test_leaves_alone_what_it_is_handed"),
    Fault("draws from the global generator", Draws, "test_leaves_alone_what_it_is_handed"),
    Fault("returns an answer", Answers, "test_hears_an_engine_from_start_to_stop"),
    Fault("holds requests of others", HoldsOthers, "test_holds_only_requests_that_it_was_shown"),
    Fault("serves one thread only", OneThreadOnly, "test_is_called_by_any_thread"),
    Fault("waits for ever", Waits, "test_hears_an_engine_from_start_to_stop"),
    Fault("leaves a thread behind", LeavesAThread, "test_leaves_no_thread_behind"),
]


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What waits is let go after the test."""
    monkeypatch.setattr(hooks_suite, "PATIENCE_S", 0.5)
    yield
    Waits.event.set()
    LeavesAThread.event.set()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_plugin_that(fault: Fault, released: None) -> None:
    Waits.event.clear()
    LeavesAThread.event.clear()
    check_fault(fault, HooksSuite, plugin=fault.plugin())
