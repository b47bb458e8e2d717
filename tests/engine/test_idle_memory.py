"""What requests freed leaves the process when the engine has nothing to do."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

import psutil
import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.engine.idle_memory import THREAD_NAME, IdleMemory

MIB = 2**20
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back what was freed")


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.fixture(autouse=True)
def no_timer_of_another_test() -> None:
    for timer in timers():
        timer.join(timeout=60)


def freed_in_between() -> list[torch.Tensor]:
    """Pieces of 60 kB of which every other was freed: 60 MB that the C library keeps, since the rest lies behind."""
    pieces = [torch.ones(15_000) for _ in range(2_000)]
    del pieces[::2]
    return pieces


def test_what_the_last_requests_freed_leaves_the_process(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
    engine.step()
    assert timers() == []
    pieces = freed_in_between()
    before = resident()
    while engine.has_unfinished_requests():
        engine.step()
    (timer,) = timers()
    timer.join(timeout=60)
    assert resident() < before - 30 * MIB
    assert len(pieces) == 1_000
    assert timers() == []  # once, and not again before the next request


def test_an_aborted_request_leaves_an_idle_engine(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
    pieces = freed_in_between()
    before = resident()
    engine.abort_request("a")
    (timer,) = timers()
    timer.join(timeout=60)
    assert resident() < before - 30 * MIB
    assert len(pieces) == 1_000


def test_an_engine_that_works_again_keeps_its_memory() -> None:
    memory = IdleMemory(quiet_s=1.0)
    memory.rest()
    (timer,) = timers()
    memory.work()
    pieces = freed_in_between()
    before = resident()
    timer.join(timeout=60)
    assert resident() > before - 10 * MIB
    assert len(pieces) == 1_000


def test_a_rest_that_is_interrupted_counts_from_its_last_request() -> None:
    memory = IdleMemory(quiet_s=1.0)
    memory.rest()
    (first,) = timers()
    memory.work()
    memory.rest()
    assert timers() == [first]
    pieces = freed_in_between()
    before = resident()
    # The first timer finds that the rest began later than it did, and leaves what is missing to another.
    first.join(timeout=60)
    for timer in timers():
        timer.join(timeout=60)
    assert resident() < before - 30 * MIB
    assert len(pieces) == 1_000


def test_a_shut_down_engine_leaves_no_timer(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    (timer,) = timers()
    llm.shutdown()
    timer.join(timeout=60)
    assert timers() == []
