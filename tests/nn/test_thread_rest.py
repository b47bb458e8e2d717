"""How many threads the team goes on with, by times that are made up: lost ones in, numbers of threads out."""

from __future__ import annotations

from ctypes import CDLL, byref, c_char, c_int32, c_int64

import pytest

from dovetail.nn import native

pytestmark = pytest.mark.skipif(not native.find_compilers(), reason="no C compiler")

MS = 1_000_000


class Rule:
    """Told times, in milliseconds."""

    def __init__(self) -> None:
        self._library: CDLL = native.load(native.TEAM)
        self._rest = (c_char * 256)()
        self._library.begin_rest(byref(self._rest))

    def threads(self, at: float, asked: int = 2) -> int:
        """How many the loop has that begins then."""
        found: int = self._library.rest_threads_at(byref(self._rest), c_int32(asked), c_int64(int(at * MS)))
        return found

    def late(self, at: float, lost: float, asked: int = 2) -> None:
        """A loop ends then for which the caller waited so long."""
        times = c_int64(int(at * MS)), c_int64(int(lost * MS))
        self._library.rest_note_late(byref(self._rest), c_int32(asked), *times)


def late_twice(asked: int = 2) -> Rule:
    """At 1000, which is borne after a second without any, and at 1004."""
    rule = Rule()
    for at in (1000, 1004):
        rule.late(at, lost=3, asked=asked)
    return rule


def test_all_threads_that_are_asked_for_while_none_is_late() -> None:
    rule = Rule()
    assert [rule.threads(at, asked) for at, asked in ((0, 2), (5, 8), (900, 2))] == [2, 8, 2]


def test_a_wait_that_is_little_beside_what_went_well_is_borne() -> None:
    rule = Rule()
    for at in range(1000, 2000, 5):
        rule.late(at, lost=0.5)
        assert rule.threads(at) == 2


def test_one_thread_less_for_a_time_in_proportion_to_the_time_lost() -> None:
    rule = late_twice()
    assert [rule.threads(at) for at in (1004, 1020, 1027)] == [1, 1, 1]
    assert rule.threads(1029) == 2


def test_a_neighbour_that_stays_is_tried_less_and_less_often() -> None:
    rule, now, rests = late_twice(), 1004.0, []
    for _ in range(5):
        began = now
        while rule.threads(now) == 1:
            now += 1
        rests.append(now - began)
        now += 3
        rule.late(now, lost=3)  # the first loop with two threads
    assert rests == sorted(rests)
    assert rests[-1] > 4 * rests[0]
    assert rests[-1] <= 500


def test_after_one_that_went_the_thread_is_back_at_once() -> None:
    rule = late_twice()
    assert all(rule.threads(at) == 2 for at in range(1029, 1500))


def test_of_many_threads_one_is_left_out_at_a_time() -> None:
    rule = late_twice(asked=8)
    assert rule.threads(1004, asked=8) == 7
    rule.late(1007, lost=3, asked=8)
    assert rule.threads(1007, asked=8) == 6
