"""Gathers all facts, in an order in which nothing disturbs what is measured after it."""

from __future__ import annotations

from dovetail.commands import Explanation, detect_environment
from dovetail.plugins.commands.doctor.bandwidth import measure_bandwidth
from dovetail.plugins.commands.doctor.facts import Examination, Machine, Measured
from dovetail.plugins.commands.doctor.load import LoadWatch
from dovetail.plugins.commands.doctor.machine import examine_machine
from dovetail.plugins.commands.doctor.model import examine_model
from dovetail.plugins.commands.doctor.products import measure_products
from dovetail.plugins.commands.doctor.run import run_engine
from dovetail.plugins.commands.doctor.software import examine_software


def examine(explanation: Explanation | None, *, run: bool, context: int | None) -> Examination:
    """The machine, and the model where there is an explanation of one; `run`: loads and runs it, too."""
    environment = detect_environment("cpu")
    machine = examine_machine(environment)
    software = examine_software()
    watch = LoadWatch(machine.cpu.cpus)
    measured = _measure(machine)
    model = None if explanation is None else examine_model(explanation, environment, measured, context)
    ran = None
    if run and model is not None and explanation is not None and explanation.resolved is not None:
        ran = run_engine(explanation.resolved, model.traffic.context)
    return Examination(machine, software, watch.read(), measured, model, ran)


def _measure(machine: Machine) -> Measured:
    threads = machine.cpu.usable_cores
    reader, bandwidths = measure_bandwidth(machine.caches, machine.memory.available, threads)
    return Measured(threads, reader, bandwidths, measure_products(threads))
