"""The rules about the executor: the machine of its workers, the device, and the threads of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.config.resolved import Component
from dovetail.config.schema import AUTO
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.executor import Executor, ExecutorNeed
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment, FixableReason, PluginOptions
from dovetail.engine.resolving.choose import Chosen, Question
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import EXECUTOR

_GIB = 2**30
_MOST_STRICT_RANKS = 2


@dataclass(frozen=True)
class FoundExecutor:
    """An executor that is chosen and not settled yet, and what it is asked."""

    question: Question[Executor]
    chosen: Chosen[Executor]
    need: ExecutorNeed


def find_executor(state: Resolution) -> FoundExecutor:
    """The executor; decides the device. From here on `state.environment` is that of its workers."""
    section, asked = state.config.executor, state.config.device
    _refuse_ranks(state)
    seen: dict[type[Executor], tuple[ExecutorNeed, Environment]] = {}

    def ask(executor: type[Executor], options: PluginOptions) -> Sequence[str]:
        environment = executor.environment(options, state.environment)
        if asked != AUTO:
            environment = dataclasses.replace(environment, device_type=asked)
        need = ExecutorNeed(
            environment.device_type,
            section.tensor_parallel,
            section.pipeline_parallel,
            enforce_eager=section.enforce_eager,
            max_num_seqs=state.config.scheduler.max_num_seqs,
            num_replicas=state.num_replicas,
        )
        seen[executor] = need, environment
        return reasons_against(executor, need, options, environment)

    question = Question(state, EXECUTOR, None, ask=ask)
    try:
        chosen = question.pick()
    except ConfigError:
        _refuse_missing_device(state, [environment for _, environment in seen.values()])
        raise
    need, environment = seen[chosen.plugin]
    _refuse_missing_device(state, [environment])
    chosen = _noting_machine(state, chosen, environment)
    state.environment = environment
    _decide_device(state, environment)
    return FoundExecutor(question, chosen, need)


def _refuse_ranks(state: Resolution) -> None:
    section = state.config.executor
    if state.is_strict and section.tensor_parallel > _MOST_STRICT_RANKS:
        raise ConfigError(
            f"executor.tensor_parallel {section.tensor_parallel} ({state.layered.origin('executor.tensor_parallel')}): "
            f"with reproducibility: strict at most {_MOST_STRICT_RANKS} ranks may share a layer, since the order in "
            "which more of them are summed depends on the batch; lower it, or leave reproducibility at default"
        )


def _refuse_missing_device(state: Resolution, machines: Sequence[Environment]) -> None:
    """Of other accelerators than GPUs only their executors know (`Executor.check`)."""
    if state.config.device == "cuda" and machines and not any(machine.devices for machine in machines):
        origin, why = state.layered.origin("device"), machines[0].no_devices or "torch sees no such device here"
        raise ConfigError(f"device 'cuda' ({origin}): {why}; or use cpu, or leave it at auto")


def _noting_machine(state: Resolution, chosen: Chosen[Executor], environment: Environment) -> Chosen[Executor]:
    """With a word about the workers' machine where it is another than this process's."""
    if environment == dataclasses.replace(state.environment, device_type=environment.device_type):
        return chosen
    gpus = "".join(f", {device.name}" for device in environment.devices)
    machine = f"{environment.num_cpus} CPUs, {environment.memory_bytes / _GIB:.1f} GiB{gpus}"
    note = f"its workers run on another machine ({machine}), for which all else is chosen"
    return dataclasses.replace(chosen, reason="; ".join(filter(None, (chosen.reason, note))))


def _decide_device(state: Resolution, environment: Environment) -> None:
    none = f"no accelerator: {environment.no_devices}" if environment.no_devices else "no accelerator"
    if environment.device_type == "cpu":
        reason = none
    else:
        reason = "an accelerator that torch sees" if environment.devices else "the device of the executor's workers"
    state.decide("device", environment.device_type, reason)
    if state.config.device == AUTO and isinstance(environment.no_devices, FixableReason):
        state.fixable.setdefault(str(environment.no_devices), []).append("device cuda")
    if environment.device_type != "cpu":
        for mismatch in environment.mismatches:
            state.warn(mismatch)


def settle_executor(state: Resolution, found: FoundExecutor) -> Component:
    """Decides what `find_executor` found, and the threads of each worker."""
    chosen = found.chosen
    found.question.settle(chosen)
    section = state.config.executor
    if section.threads is not None:
        _remark_threads(state, section.threads, section.num_ranks)
        return chosen.component
    with chosen.calling("threads"):
        told = chosen.plugin.threads(found.need, chosen.options, state.environment)
    if told is None:
        return chosen.component
    state.decide("executor.threads", told.count, told.reason)
    _remark_threads(state, told.count, section.num_ranks)
    options = chosen.component.options
    own = {"threads": told.count} if "threads" in options else {}
    return dataclasses.replace(chosen.component, options={**options, **own})


def _remark_threads(state: Resolution, threads: int, ranks: int) -> None:
    """More threads than cores wait for each other at the end of every parallel loop."""
    environment = state.environment
    cores = environment.num_cores or environment.num_cpus
    if threads * ranks > cores:
        asked = f"{threads} threads on each of {ranks} ranks" if ranks > 1 else f"{threads} threads"
        most = max(1, cores // ranks)
        advice = f"ask for {most} at most" if threads > most else f"use {cores} ranks at most"
        state.remark(
            "executor.threads",
            f"{asked} are more than the {cores} cores that this process may use, so steps wait for threads that do not "
            f"run: {advice}",
        )
