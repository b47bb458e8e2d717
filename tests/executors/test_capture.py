"""What the null device's graphs repeat, and what they refuse, as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dovetail.contracts.device import Graph
from dovetail.executors.gpu.capture import CaptureError, capture
from dovetail.executors.gpu.host import HostDevice
from dovetail.nn import TorchDistributed


@pytest.fixture(autouse=True)
def inference() -> object:
    with torch.inference_mode():
        yield


def test_a_graph_repeats_operations_and_not_python() -> None:
    """A branch of Python, and a number that it computed, stay as they were when the graph was captured."""
    x, out, factor = torch.ones(3), torch.zeros(3), [2.0]

    def work() -> None:
        y = x * factor[0]
        out.copy_(y + 1 if factor[0] == 2.0 else y)

    graph = capture(work)
    assert out.tolist() == [0, 0, 0], "a capture runs nothing"
    factor[0] = 5.0
    x.fill_(10)
    graph.replay()
    assert out.tolist() == [21, 21, 21]


def test_results_live_where_the_capture_made_them() -> None:
    """Of a view, an update in place, several results, and memory without numbers yet."""
    x, found = torch.tensor([3.0, 1.0, 2.0]), {}

    def work() -> None:
        values, places = x.sort()
        made = torch.empty(3)
        made[:] = values
        made[1:].mul_(10)
        found["made"], found["places"] = made, places

    graph = capture(work)
    assert found["made"].isnan().all(), "nothing is computed before the first replay"
    graph.replay()
    assert (found["made"].tolist(), found["places"].tolist()) == ([1, 20, 30], [1, 2, 0])
    x.copy_(torch.tensor([7.0, 8.0, 9.0]))
    graph.replay()
    assert (found["made"].tolist(), found["places"].tolist()) == ([7, 80, 90], [0, 1, 2])


def test_memory_that_was_never_written_is_no_number() -> None:
    found: list[torch.Tensor] = []
    graph = capture(lambda: found.append(torch.empty(2) + 1))
    graph.replay()
    assert found[0].isnan().all()


def test_what_was_made_anew_for_a_step_is_missed() -> None:
    """A graph holds addresses: a plan that makes tensors in place of filling its own leaves it with freed memory."""
    plan, out = {"table": torch.ones(2)}, torch.zeros(2)
    graph = capture(lambda: out.copy_(plan["table"] * 2))
    graph.replay()
    plan["table"] = torch.full((2,), 3.0)
    with pytest.raises(CaptureError, match="was freed since it was captured"):
        graph.replay()


_COUNTS, _FLOATS = torch.tensor([1, 2, 0]), torch.tensor([1.0, -1.0, 2.0])


@pytest.mark.parametrize(
    "work",
    [
        lambda: _FLOATS.sum().item(),
        lambda: bool((_FLOATS > 0).all()),
        lambda: range(int(_COUNTS[1])),
        lambda: _FLOATS.nonzero(),
        lambda: _FLOATS[_FLOATS > 0],
        lambda: _COUNTS.bincount(),
        lambda: _COUNTS.unique(),
        lambda: torch.repeat_interleave(_COUNTS),
        lambda: torch.nn.functional.one_hot(_COUNTS),
        lambda: torch.equal(_FLOATS, _FLOATS),
        lambda: _COUNTS.tolist(),
        lambda: _COUNTS.numpy(),
        lambda: _COUNTS.cpu(),
        lambda: torch.tensor([1, 2]),
    ],
)
def test_what_waits_for_the_device_is_refused(work: Callable[[], object]) -> None:
    with pytest.raises(CaptureError, match="no capture can do"):
        capture(lambda: (work(), None)[1])


@pytest.mark.parametrize("wait", [HostDevice.synchronize, lambda device: device.record().wait()])
def test_waiting_for_a_stream_is_refused(wait: Callable[[HostDevice], None]) -> None:
    device = HostDevice("cpu")
    with pytest.raises(CaptureError, match="inside captured work"):
        device.capture(lambda: wait(device))
    device.synchronize()  # a capture that failed leaves this device as it was


def test_native_kernels_are_recorded() -> None:
    """They bypass torch's dispatcher. The order among torch's own operations is kept."""
    from dovetail.plugins.operators.native.operators import NativeOperators

    operators = NativeOperators(NativeOperators.Options())
    x, weight, found = torch.randn(3, 64), torch.rand(64), {}

    def work() -> None:
        found["y"] = operators.rms_norm(x + 1, weight, 1e-6) * 2

    graph: Graph = capture(work)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(found["y"], operators.rms_norm(x + 1, weight, 1e-6) * 2)


def test_collectives_are_recorded(tmp_path: Path) -> None:
    """As they pass torch's dispatcher. Here of one rank, whose gathering copies."""
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    try:
        group, x, found = TorchDistributed(), torch.ones(2, 3), {}
        graph = capture(lambda: found.update(y=group.all_gather(group.all_reduce(x * 2), dim=-1) + 1))
        for number in (1.0, 5.0):
            x.fill_(number)
            graph.replay()
            assert found["y"].tolist() == [[2 * number + 1] * 3] * 2
    finally:
        dist.destroy_process_group()
