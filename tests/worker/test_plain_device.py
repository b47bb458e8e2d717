"""The device of workers whose executor brings none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.executor import Placement, WorkerLayout
from dovetail.worker import worker_setup
from dovetail.worker.model_worker import ModelWorker
from dovetail.worker.plain_device import PlainDevice


def test_the_gpu_of_a_rank_is_the_current_one_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, and NCCL takes it for the rank's."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **more: calls.append((backend, more["device_id"]))
    )
    monkeypatch.setattr(worker_setup, "bootstrap", lambda *_: None)
    monkeypatch.setattr(worker_setup, "TorchDistributed", lambda: None)
    layout = WorkerLayout(tensor_parallel=2)
    placement = Placement(rank=1, layout=layout, device="cuda:1", init_method="file:///unused")
    config = SimpleNamespace(components=tuple, plugin_hash="")
    ModelWorker(cast(ResolvedConfig, config), placement)
    assert calls == ["cuda:1", ("nccl", torch.device("cuda:1"))]


def test_a_cpu_selects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    PlainDevice("cpu")
    assert calls == []


class FakeEvent:
    """An event of a driver that answers what it is told to."""

    def __init__(self, device: torch.device):
        self.device, self.is_reached, self.num_records = device, False, 0

    def record(self) -> None:
        self.num_records += 1

    def query(self) -> bool:
        return self.is_reached


def test_an_accelerators_event_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that swaps that are done are forgotten, and nothing waits to learn it."""
    made: list[FakeEvent] = []
    monkeypatch.setattr(torch, "Event", lambda device: made.append(FakeEvent(device)) or made[-1])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    event = PlainDevice("cuda:1").record()
    assert (made[0].device, made[0].num_records, event.is_done()) == (torch.device("cuda:1"), 1, False)
    made[0].is_reached = True
    assert event.is_done()


def test_a_cpus_work_is_done_when_it_is_handed_over() -> None:
    device, done = PlainDevice("cpu"), []
    device.launch(lambda: done.append(1))
    event = device.record()
    event.wait()
    assert event.is_done()
    assert done == [1]
