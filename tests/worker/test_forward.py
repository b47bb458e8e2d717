"""Which passes a runner may record and repeat."""

from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import torch

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.attention import AttentionSetup
from dovetail.contracts.device import DeviceMemory, Graph, Runtime, Work
from dovetail.contracts.errors import ConfigError, WorkerError
from dovetail.contracts.kv import KVSpec, LayerCache, StateSpec
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.executors.gpu.host import HostDevice
from dovetail.worker.forward import (
    EagerForward,
    GraphForward,
    ModelPass,
    RepeatingForward,
    States,
    create_forward,
    create_graphs,
)
from dovetail.worker.plain_device import PlainDevice
from dovetail.worker.stage_link import OnlyStage

PAGES, STATE = KVSpec(num_kv_heads=2, head_size=8, dtype="float32"), StateSpec(num_elements=64, dtype="float32")


def no_pass(ids: torch.Tensor, positions: torch.Tensor) -> States:
    """Passes are not run here."""
    raise NotImplementedError


@pytest.mark.parametrize(("caches", "repeats"), [((PAGES, None, PAGES), True), ((PAGES, STATE), False)])
def test_passes_that_change_a_state_are_not_repeated(caches: tuple[LayerCache | None, ...], repeats: bool) -> None:
    """Proving a recording runs a pass twice, and a state would have advanced twice."""
    forward = create_forward(
        PlainDevice("cpu"), None, no_pass, {}, cast(Any, SchedulerLimits), [1], OnlyStage(), caches=caches
    )
    assert isinstance(forward, RepeatingForward) == repeats


def test_an_executor_that_names_graphs_which_no_step_has_is_refused() -> None:
    """Any executor may bring a `Runtime`, and not all look at the need's max_num_seqs."""
    runtime, limits = Runtime(PlainDevice, graphs=(2, 8)), SchedulerLimits(64, 4, 64)
    with pytest.raises(ConfigError, match="max_num_seqs is 4"):
        create_forward(PlainDevice("cpu"), runtime, no_pass, {}, limits, [1], OnlyStage())


class CountingDevice(HostDevice):
    """Captures take 500 bytes once, for the memory that they share, and 20 bytes each."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.num_captures = 0

    def capture(self, work: Work) -> Graph:
        graph = super().capture(work)
        self.graphs.add(graph)
        self.num_captures += 1
        return graph

    def memory(self) -> DeviceMemory:
        count = len(self.graphs)
        return DeviceMemory(10_000 - 20 * count - (500 if count else 0), 10_000)


def graphs_of(device: HostDevice, forward: ModelPass, sizes: tuple[int, ...] = (1, 2, 4)) -> GraphForward:
    setup = AttentionSetup((), PAGES, 4, "float32", "cpu", 4, 64, 64)
    backend = ReferenceBackend(ReferenceBackend.Options(), setup)
    runtime = Runtime(HostDevice, graphs=sizes)
    return create_graphs(device, runtime, forward, {0: backend}, SchedulerLimits(64, 4, 64), [1, 3], OnlyStage())


def doubled(ids: torch.Tensor, positions: torch.Tensor) -> States:
    return 2.0 * ids[:, None], None


def test_what_all_graphs_take_is_measured_on_the_two_largest() -> None:
    device = CountingDevice()
    graphs = graphs_of(device, doubled)
    assert graphs.measure() == 500 + 6 * 20  # three sizes, with one and with three query tokens
    assert (device.num_captures, len(device.graphs)) == (2, 0)
    before = device.memory().free
    graphs.prepare()
    assert before - device.memory().free == 500 + 6 * 20


def test_a_capture_that_fails_ends_the_worker() -> None:
    """Whatever said that it could be captured: nobody can rely on the process afterwards."""

    def waiting(ids: torch.Tensor, positions: torch.Tensor) -> States:
        return torch.zeros(len(ids), 1 + int(ids.max())), None

    with pytest.raises(WorkerError, match=r"cannot be used any more: CaptureError: .* Set executor.cuda_graphs to off"):
        graphs_of(HostDevice("cpu"), waiting).prepare()


def test_auto_says_why_nothing_is_captured_and_sizes_that_are_named_refuse(caplog: pytest.LogCaptureFixture) -> None:
    limits, why = SchedulerLimits(64, 4, 64), "model.layers.1.mlp: a mixture waits"
    forward = create_forward(
        HostDevice("cpu"), Runtime(HostDevice), no_pass, {}, limits, [1], OnlyStage(), obstacle=why
    )
    assert isinstance(forward, EagerForward)
    assert "without captured graphs: model.layers.1.mlp: a mixture waits" in caplog.text
    with pytest.raises(ConfigError, match=r"cuda_graphs \[2\]: model.layers.1.mlp: a mixture waits"):
        create_forward(
            HostDevice("cpu"), Runtime(HostDevice, graphs=(2,)), no_pass, {}, limits, [1], OnlyStage(), obstacle=why
        )


class Eager(HostDevice):
    """Of an executor of others, for a device that has no graphs."""

    def capture(self, work: Work) -> Graph:
        raise ConfigError("this device captures no graphs")


def test_a_device_that_captures_nothing_runs_eagerly_where_nobody_names_sizes(caplog: pytest.LogCaptureFixture) -> None:
    setup = AttentionSetup((), PAGES, 4, "float32", "cpu", 4, 64, 64)
    backends = {0: ReferenceBackend(ReferenceBackend.Options(), setup)}
    device, limits = Eager("cpu"), SchedulerLimits(64, 4, 64)
    forward = create_forward(device, Runtime(HostDevice), doubled, backends, limits, [1], OnlyStage())
    assert isinstance(forward, EagerForward)
    assert "without captured graphs: this device captures no graphs" in caplog.text
    with pytest.raises(ConfigError, match="this device captures no graphs"):
        create_forward(device, Runtime(HostDevice, graphs=(2,)), doubled, backends, limits, [1], OnlyStage())


class CachingDevice(CountingDevice):
    """Its allocator keeps 1,000 bytes of each step that was launched, until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = 0

    def launch(self, work: Work, **more: Any) -> None:
        super().launch(work, **more)
        self.cached += 1000

    def memory(self) -> DeviceMemory:
        memory = super().memory()
        return DeviceMemory(memory.free - self.cached, memory.total)

    def release_unused(self) -> None:
        self.cached = 0


def test_memory_that_an_allocator_keeps_is_not_the_graphs() -> None:
    assert graphs_of(CachingDevice(), doubled).measure() == 500 + 6 * 20
