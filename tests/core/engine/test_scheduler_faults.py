"""A scheduler that breaks its contract is named at once, whatever it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import PluginError

SOURCE = """
from dovetail.contracts.scheduler import RequestStatus, Schedule, Scheduler


class Faulty(Scheduler):
    contract = (1, 0)
    num_running = 0

    @property
    def num_waiting(self):
        return len(self.requests)

    def __init__(self, options, limits):
        super().__init__(options, limits)
        self.requests = []

    def add(self, request):
        self.requests.append(request)

    def remove(self, request):
        self.requests.remove(request)

    def take(self, memory, blocks=True):
        request = self.requests[0]
        if blocks:
            memory.attach_prefix(request)
            memory.allocate(request, request.num_wanted_tokens)
        request.status = RequestStatus.RUNNING
        return request


class Raises(Faulty):
    def schedule(self, memory):
        raise KeyError("x")


class TooMany(Faulty):
    def schedule(self, memory):
        request = self.take(memory)
        return Schedule([request], [request.num_wanted_tokens + 1])


class Twice(Faulty):
    def schedule(self, memory):
        request = self.take(memory)
        return Schedule([request, request], [1, 1])


class NoBlocks(Faulty):
    def schedule(self, memory):
        return Schedule([self.take(memory, blocks=False)], [1])


class Uneven(Faulty):
    def schedule(self, memory):
        return Schedule([self.take(memory)], [])


class Nothing(Faulty):
    def schedule(self, memory):
        return None


class Words(Faulty):
    def schedule(self, memory):
        return Schedule([self.take(memory)], ["all"])


class Names(Faulty):
    def schedule(self, memory):
        return Schedule(["llm-0"], [1])
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raises", "scheduler Raises raised KeyError: 'x'"),
        ("TooMany", "wants 3 tokens and is scheduled with 4"),
        ("Twice", "stands in one schedule twice"),
        ("NoBlocks", "without blocks: allocate first"),
        ("Uneven", "names 1 requests and 0 token counts"),
        ("Nothing", "returned a NoneType, not a Schedule"),
        ("Words", "its Schedule holds what cannot be there"),
        ("Names", "its Schedule holds what cannot be there"),
    ],
)
def test_the_fault_is_told(make_llm: Callable[..., LLM], tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "faulty.py").write_text(SOURCE)
    llm = make_llm(scheduler={"name": f"{tmp_path}/faulty.py:{name}"})
    with pytest.raises(PluginError, match=words):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
