"""The threads that kernels share: every turn once, whatever the other threads do meanwhile."""

from __future__ import annotations

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.nn import native

pytestmark = pytest.mark.skipif(not native.find_compilers(), reason="no C compiler")

CASES = Path(__file__).with_name("team_cases.c")


def cases() -> CDLL:
    library = native.load(CASES)
    library.visit_all.argtypes = (c_void_p, c_void_p, c_int64, c_int32)
    library.visit_all.restype = None
    library.visit_all_beside_stuck.argtypes = (c_void_p, c_void_p, c_int64, c_int64)
    return library


def thread_limit() -> int:
    """How many threads the next loop may have."""
    limit: int = native.load(native.TEAM).team_limit()
    return limit


def visit_all(turns: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each turn was done, and by which thread."""
    visits, who = np.zeros(turns, np.int32), np.full(turns, -1, np.int32)
    cases().visit_all(visits.ctypes.data, who.ctypes.data, turns, threads)
    return visits, who


def hold_a_helper(turns: int, held_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """The same, with a helper that is stuck in the first turn that it takes. Tries again while no helper comes."""
    while True:
        visits, who = np.zeros(turns, np.int32), np.full(turns, -1, np.int32)
        if cases().visit_all_beside_stuck(visits.ctypes.data, who.ctypes.data, turns, held_ns):
            return visits, who


@settings(deadline=None, max_examples=200)
@given(turns=st.integers(0, 300), threads=st.integers(1, 9))
def test_every_turn_is_done_once(turns: int, threads: int) -> None:
    visits, who = visit_all(turns, threads)
    assert (visits == 1).all()
    assert ((who >= 0) & (who < threads)).all(), "each thread has scratch memory by its number"


def test_many_loops_in_a_row_lose_no_turn() -> None:
    for count in range(5000):
        visits, _ = visit_all(count % 40, 2 + count % 3)
        assert (visits == 1).all()


def test_the_caller_does_all_turns_but_those_that_a_stuck_thread_has_begun() -> None:
    visits, who = hold_a_helper(64, 0)
    assert (visits == 1).all()
    assert (who == 0).sum() == 63


def test_a_thread_that_does_not_run_is_left_out_and_tried_again_later() -> None:
    limit = 2
    while limit > 1:  # once alone may be borne, where all went well for long
        hold_a_helper(64, 60_000_000)
        _, who = visit_all(64, 2)
        limit = thread_limit()  # after a loop, which raises it once the rest is over: so it was this before it, too
    assert (who == 0).all()
    while thread_limit() == 1:
        pass  # until the rest is over: half a second at most
    assert (visit_all(64, 2)[0] == 1).all()


def test_callers_in_several_threads_get_each_its_own_loop() -> None:
    with ThreadPoolExecutor(3) as pool:
        for visits, _ in pool.map(lambda count: visit_all(50 + count % 7, 3), range(600)):
            assert (visits == 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to cores on Linux only")
def test_more_threads_than_cores() -> None:
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        for _ in range(50):
            assert (visit_all(100, 4)[0] == 1).all()
    finally:
        os.sched_setaffinity(0, usable)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    visit_all(100, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if all((visit_all(100, 3)[0] == 1).all() for _ in range(20)) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (visit_all(100, 3)[0] == 1).all()


def test_torch_computes_alone_where_it_is_told_to() -> None:
    native.load(CASES)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with native.torch_alone():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
