"""The null device: what may happen late happens late, and what is missing shows."""

from __future__ import annotations

import pytest
import torch

from dovetail.executors.gpu.host import HostDevice, at_once, early, late


def test_work_of_the_late_order_waits_for_its_event() -> None:
    device, done = HostDevice("cpu", "late"), []
    device.launch(lambda: done.append(1))
    first = device.record()
    device.launch(lambda: done.append(2))
    assert (done, first.is_done()) == ([], False)
    first.wait()
    assert (done, first.is_done(), device.num_waits) == ([1], True, 1)
    device.synchronize()
    assert done == [1, 2]


def test_work_at_once_is_done() -> None:
    device, done = at_once("cpu"), []
    device.launch(lambda: done.append(1))
    assert done == [1]
    assert device.record().is_done()


@pytest.mark.parametrize(("make", "order"), [(late, ["main", "side"]), (early, ["main", "side"])])
def test_a_stream_waits_for_what_it_is_told_to(make: type[HostDevice], order: list[str]) -> None:
    device, done = make("cpu"), []
    side = device.create_stream()
    device.launch(lambda: done.append("main"))
    device.launch(lambda: done.append("side"), stream=side, after=[device.record()])
    device.record(side).wait()
    assert done == order


def test_without_being_told_a_side_stream_runs_ahead_or_behind() -> None:
    """So that a missing wait reads what is not written yet: too early in one order, never in the other."""
    ahead, behind = HostDevice("cpu", "early"), HostDevice("cpu", "late")
    for device, expected in ((ahead, ["side", "main"]), (behind, ["main"])):
        done: list[str] = []
        side = device.create_stream()
        device.launch(lambda done=done: done.append("main"))  # type: ignore[misc]
        device.launch(lambda done=done: done.append("side"), stream=side)  # type: ignore[misc]
        device.record().wait()
        assert done == expected


def test_an_error_is_raised_by_the_wait_and_once() -> None:
    device, done = late("cpu"), []
    device.launch(lambda: [][0])
    device.launch(lambda: done.append(1))
    event = device.record()
    with pytest.raises(IndexError):
        event.wait()
    event.wait()
    assert done == [1]


def test_a_host_buffer_that_changes_too_soon_gives_the_wrong_copy() -> None:
    """What the double buffers of a step are there for."""
    device = late("cpu")
    source, target = device.host_buffer(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    source.fill_(1)
    device.launch(lambda: target.copy_(source, non_blocking=True))
    source.fill_(2)
    device.record().wait()
    assert target.tolist() == [2, 2]


@torch.inference_mode()
def test_a_graph_does_its_work_again() -> None:
    device, total = late("cpu"), torch.zeros(1)
    graph = device.capture(lambda: total.add_(1))
    assert total.item() == 0
    for _ in range(3):
        device.launch(graph.replay)
    device.synchronize()
    assert total.item() == 3
