"""Splits live traffic between the arms of experiments.

Everything follows from the experiment's description and a unit's key, by hashes: engines that share a config agree, a
restart changes nothing, and nobody keeps a list. Where experiments divide the traffic, one draw of the unit says which
of them it is in; another one, which the experiment's name goes into, says its arm. So more `traffic` adds units and
moves none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.telemetry import ArmDescription, Assignment, ExperimentDescription
from dovetail.engine.input_processor import drafting_refusal
from dovetail.engine.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class Chosen:
    """An arm for a request."""

    experiment: ExperimentDescription
    arm: ArmDescription
    unit_hash: str
    slice: int | None

    def assignment(self, num_running: int, requests: RequestTable) -> Assignment:
        """What telemetry tells of it. `requests`: those that are under way."""
        name, arm = self.experiment.name, self.arm.name
        return Assignment(
            experiment=name,
            arm=arm,
            unit_hash=self.unit_hash,
            slice=self.slice,
            num_running=num_running,
            num_others=requests.num_others(name, arm),
        )


class Experiments:
    """The experiments of one engine. They have the same unit, seed and slices, and divide the traffic."""

    def __init__(
        self,
        experiments: Sequence[ExperimentDescription],
        facts: EngineFacts,
        clock: Callable[[], float] = time.time,
    ):
        """`experiments`: at least one. `clock`: seconds since 1970."""
        self._experiments = experiments
        self._facts = facts
        self._clock = clock

    def choose(self, request_id: str, params: SamplingParams, user: str | None) -> Chosen | None:
        """The arm of a new request; None where it takes part in no experiment: it says itself what it wants of
        speculation, nobody knows its user where users are drawn, some arm could not serve it, or its unit was not
        drawn."""
        if not (params.speculation is params.acceptance is params.prediction is None):
            return None
        first = self._experiments[0]
        number = int(self._clock() // first.slice_s) if first.unit == "slice" else None
        key = {"request": request_id, "user": user, "slice": str(number)}[first.unit]
        experiment = self._experiment_of(key) if key is not None else None
        if experiment is None or key is None or not self._serves(experiment, params):
            return None
        return Chosen(experiment, arm_of(experiment, key), unit_hash(experiment, key), number)

    def _experiment_of(self, key: str) -> ExperimentDescription | None:
        point, begin = _draw("traffic", self._experiments[0], "", key), 0.0
        for experiment in self._experiments:
            begin += experiment.traffic
            if point < begin:
                return experiment
        return None

    def _serves(self, experiment: ExperimentDescription, params: SamplingParams) -> bool:
        """Whether every arm does: requests that one alone refuses would make arms differ by their requests."""
        drafts = any(arm.drafter is not None for arm in experiment.arms)
        return not drafts or drafting_refusal(self._facts, params) is None


def arm_of(experiment: ExperimentDescription, key: str) -> ArmDescription:
    """The arm of a unit that takes part."""
    point, end = _draw("arm", experiment, experiment.name, key), 0.0
    for arm in experiment.arms:
        end += arm.share
        if point < end:
            return arm
    return experiment.arms[-1]  # shares may sum to a little less than 1


def unit_hash(experiment: ExperimentDescription, key: str) -> str:
    """A unit's pseudonym, another one in each experiment."""
    return _digest("unit", experiment, experiment.name, key).hex()


def _draw(purpose: str, experiment: ExperimentDescription, name: str, key: str) -> float:
    """A number in [0, 1), uniform over keys."""
    return (int.from_bytes(_digest(purpose, experiment, name, key)) >> 11) / (1 << 53)


def _digest(purpose: str, experiment: ExperimentDescription, name: str, key: str) -> bytes:
    text = "\0".join([purpose, name, str(experiment.seed), experiment.unit, key])
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
