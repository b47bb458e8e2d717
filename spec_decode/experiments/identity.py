"""What a journal is of: turns of other experiments, prompts, models or machines cannot be put with its own."""

from __future__ import annotations

import os
from typing import Any

from dovetail.commands.machine import describe_machine
from dovetail.spec_decode.experiments.arms import Setup, effective_values
from dovetail.spec_decode.experiments.datasets import DataSet
from dovetail.spec_decode.experiments.provenance import describe_model
from dovetail.spec_decode.experiments.schema import Experiment

_NOT_OF_TURNS = frozenset(
    {"name", "baseline", "repetitions", "rerun_disturbed", "tie_gap", "compatibility", "keep_going"}
)
"""Keys of an experiment that leave its turns as they are: of more repetitions, the first ones are the same."""
_MACHINE = ("cpu", "usable_cpus", "memory_gib", "versions")


def identity(experiment: Experiment, setup: Setup, data: DataSet, *, until_decided: bool) -> dict[str, Any]:
    """Plain data that is equal where turns may be put together. No weight is read.

    Threads are those of the config, or else of OMP_NUM_THREADS: what torch has now may be of other engines.

    `until_decided`: the run ends by what it sees; one that does cannot go on as one that does not.
    """
    machine = describe_machine()
    return {
        "experiment": experiment.model_dump(mode="json", exclude=set(_NOT_OF_TURNS)),
        "model": describe_model(setup.engines[0].resolved),
        "prompts": {"data": data.name, "sha256": data.sha256},
        "arms": {name: effective_values(arm) for name, arm in setup.arms.items()},
        "until_decided": until_decided,
        "decided against": experiment.baseline if until_decided else None,
        "machine": {key: machine[key] for key in _MACHINE} | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
    }
