"""What requests freed leaves the process when the engine has nothing to do."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable

import psutil
import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.engine import token_engine
from dovetail.engine.idle_memory import THREAD_NAME, IdleMemory

MIB = 2**20
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back what was freed")


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.fixture(autouse=True)
def wait_for_timers() -> Callable[[], None]:
    """Waits until no timer is left, of no other test either; one may begin another."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while found := timers():
            assert time.monotonic() < deadline, found
            found[0].join(timeout=1)

    wait()
    return wait


def freed_in_between() -> list[torch.Tensor]:
    """Pieces of 60 kB of which every other was freed: 60 MB that the C library keeps, since the rest lies behind."""
    pieces = [torch.ones(15_000) for _ in range(2_000)]
    del pieces[::2]
    return pieces


def test_what_the_last_requests_freed_leaves_the_process(
    make_llm: Callable[..., LLM], wait_for_timers: Callable[[], None]
) -> None:
    engine = make_llm().engine
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
    engine.step()
    assert timers() == []
    pieces = freed_in_between()
    before = resident()
    while engine.has_unfinished_requests():
        engine.step()
    wait_for_timers()  # which ends: once, and not again before the next request
    assert resident() < before - 30 * MIB
    assert len(pieces) == 1_000


def test_an_aborted_request_leaves_an_idle_engine(
    make_llm: Callable[..., LLM], wait_for_timers: Callable[[], None]
) -> None:
    engine = make_llm().engine
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
    pieces = freed_in_between()
    before = resident()
    engine.abort_request("a")
    wait_for_timers()
    assert resident() < before - 30 * MIB
    assert len(pieces) == 1_000


def test_an_engine_that_works_again_keeps_its_memory(wait_for_timers: Callable[[], None]) -> None:
    memory = IdleMemory(quiet_s=1.0)
    memory.rest()
    memory.work()
    pieces = freed_in_between()
    before = resident()
    wait_for_timers()
    assert resident() > before - 10 * MIB
    assert len(pieces) == 1_000


def test_a_rest_that_is_interrupted_counts_from_its_last_request(wait_for_timers: Callable[[], None]) -> None:
    memory = IdleMemory(quiet_s=1.0)
    pieces = freed_in_between()
    before = resident()
    memory.rest()
    memory.work()
    memory.rest()
    assert len(timers()) == 1
    # The first timer finds that the rest began later than it did, and leaves what is missing to another.
    wait_for_timers()
    assert resident() < before - 30 * MIB
    assert len(pieces) == 1_000


def test_a_shut_down_engine_leaves_no_timer(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, wait_for_timers: Callable[[], None]
) -> None:
    monkeypatch.setattr(token_engine, "IdleMemory", lambda: IdleMemory(quiet_s=3600))
    llm = make_llm()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    assert len(timers()) == 1
    llm.shutdown()
    wait_for_timers()
