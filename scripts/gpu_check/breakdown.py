"""Where the time of a decode step goes: the kernels of a replayed step, with their calls and microseconds."""

from __future__ import annotations

from typing import Any

from common import Arguments, Report, random_model, run
from steps import Stepper
from torch.profiler import ProfilerActivity, profile

STEPS = 8
MOST = 8
"""Kernels that are named; the others are added up."""


def body(report: Report, arguments: Arguments) -> None:
    """Steps of few and of many requests."""
    with random_model(arguments) as directory:
        stepper = Stepper(arguments, directory)
        for batch in (1, 4) if arguments.null else (1, 64, 256):
            measure(report, arguments, stepper, batch, 64 if arguments.null else 1024)
        stepper.close()


def measure(report: Report, arguments: Arguments, stepper: Stepper, batch: int, context: int) -> None:
    """The kernels of one batch, the longest first; in the dry mode torch's operators."""
    stepper.decode_seconds(batch, context, 2, more=STEPS)
    stepper.executor.clock.synchronize()
    activity = ProfilerActivity.CPU if arguments.null else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        for _ in range(STEPS):
            stepper.executor.execute(stepper.again()).result()
        stepper.executor.clock.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -spent(event, arguments))
    what = f"batch {batch}, context {context}"
    report.add(f"{what}: kernels of a step", sum(spent(event, arguments) for event in events) / STEPS, "us")
    for event in events[:MOST]:
        name = event.key if len(event.key) <= 70 else event.key[:67] + "..."
        report.add(f"{what}: {event.count / STEPS:g} x {name}", spent(event, arguments) / STEPS, "us")
    report.add(f"{what}: others", sum(spent(event, arguments) for event in events[MOST:]) / STEPS, "us")


def spent(event: Any, arguments: Arguments) -> float:
    """Microseconds of its own."""
    return float(event.self_cpu_time_total if arguments.null else event.self_device_time_total)


if __name__ == "__main__":
    run("breakdown", body)
