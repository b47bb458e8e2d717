"""Reads what the telemetry sink `experiments` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.commands.checks import nearest, read_text, require
from dovetail.contracts.errors import ConfigError

FINISHED = ("stop", "length")
_REMEDY = "give the file of the sink `experiments`, as in telemetry: [{name: experiments, path: arms.jsonl}]"


class LiveArm(BaseModel):
    """An arm as it was configured."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    share: float = Field(gt=0)
    drafter: str | None


class Design(BaseModel):
    """An experiment as it was configured."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    design: str
    name: str
    arms: tuple[LiveArm, ...] = Field(min_length=2)
    unit: str
    slice_s: float
    traffic: float
    seed: int


class LiveRecord(BaseModel):
    """One request. Times are seconds, `time` since 1970."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    design: str
    experiment: str
    arm: str
    unit: str
    time: float
    """When it arrived."""
    num_running: int
    num_others: int
    finish_reason: str
    queue: float | None
    ttft: float | None
    decode: float | None
    e2e: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    n: int = Field(ge=1)
    preemptions: int
    rounds: int
    drafted: int
    accepted: int
    drafter_error: bool
    weight_version: int

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end, so that its times mean something."""
        return self.finish_reason in FINISHED and self.ttft is not None and self.output_tokens > 0

    @property
    def itl(self) -> float | None:
        """Mean seconds per token of a completion after the first; None for one token."""
        later = self.output_tokens / self.n - 1
        return self.decode / later if self.decode is not None and later > 0 else None


@dataclass(frozen=True)
class LiveTraffic:
    """The requests of one experiment under one design."""

    path: str
    design: Design
    records: Sequence[LiveRecord]
    num_of_other_designs: int
    num_lost: int
    """Lines that could not be written, of whatever experiment."""
    num_broken: int
    """Lines that cannot be read."""


def read_live(path: Path, experiment: str | None) -> LiveTraffic:
    """The requests of an experiment, by its last design; `experiment`: None takes the only one. Raises `ConfigError`
    for what is no such file, an experiment that is not in it, and one without requests."""
    designs: dict[str, Design] = {}
    records: list[LiveRecord] = []
    num_lost = num_broken = 0
    for line in read_text("RECORDS.jsonl", path).splitlines():
        if not line.strip():
            continue
        try:
            data: Mapping[str, Any] = json.loads(line)
            event = data["event"]
            if event == "request":
                records.append(LiveRecord.model_validate(data))
            elif event == "experiment":
                # Where one comes again, it is the last one.
                designs.pop(data["design"], None)
                designs[data["design"]] = Design.model_validate(data)
            elif event == "lost":
                num_lost += int(data["lines"])
        except (KeyError, TypeError, ValueError, ValidationError):
            num_broken += 1
    if not designs:
        raise ConfigError(f"{path} describes no experiment: {_REMEDY}")
    name = _chosen(path, experiment, list(dict.fromkeys(design.name for design in designs.values())))
    mine = [record for record in records if record.experiment == name]
    design = [design for design in designs.values() if design.name == name][-1]
    arms = {arm.name for arm in design.arms}
    found = [record for record in mine if record.design == design.design and record.arm in arms]
    require(bool(found), f"{path} has no request of the experiment {name!r} as it was last configured: let it run on")
    return LiveTraffic(str(path), design, found, len(mine) - len(found), num_lost, num_broken)


def _chosen(path: Path, asked: str | None, names: Sequence[str]) -> str:
    if asked is None:
        require(len(names) == 1, f"{path} has the experiments {', '.join(names)}: choose one with --experiment")
        return names[0]
    require(asked in names, f"{path} has no experiment {asked!r}; {nearest(asked, names)}")
    return asked
