"""A report: everything that an experiment found, as data, in the order in which it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from dovetail.commands.machine import Span
from dovetail.spec_decode.experiments.acceptance import DEFINITIONS, Acceptance
from dovetail.spec_decode.experiments.bootstrap import Estimate
from dovetail.spec_decode.experiments.cost import CostModel, Crossover, GridCell, StepCost
from dovetail.spec_decode.experiments.equality import Equality
from dovetail.spec_decode.experiments.features import Trial
from dovetail.spec_decode.experiments.provenance import Provenance
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import METRICS, PRIMARY, Speed

FORMAT = 1


@dataclass(frozen=True)
class ArmStatus:
    """Whether a variant ran."""

    arm: str
    length: int | None
    ran: bool
    reason: str
    """Why not; or what went wrong although it ran."""


@dataclass(frozen=True)
class Report:
    """All sections."""

    provenance: Provenance
    equality: Sequence[Equality]
    acceptance: Sequence[Acceptance]
    speed: Sequence[Speed]
    grid: Sequence[GridCell]
    crossovers: Sequence[Crossover]
    cost_models: Sequence[CostModel]
    steps: Sequence[StepCost]
    status: Sequence[ArmStatus]
    features: Sequence[Trial]
    warnings: Sequence[str]
    requests: Sequence[RequestRecord]
    step_samples: Sequence[StepRecord]
    spans: Sequence[Span]

    def rows(self) -> list[Row]:
        """One per variant and batch size but the control: what `--fail-if` judges."""
        return list(_rows(self))


@dataclass(frozen=True)
class Row:
    """One variant at one batch size, as names for expressions."""

    label: str
    values: Mapping[str, Any]
    """Dotted name -> number, text, true, false, or None where it could not be measured."""


def _rows(report: Report) -> Iterator[Row]:
    equality = {(e.arm, e.length, e.batch): e for e in report.equality}
    acceptance = {(a.arm, a.length, a.batch): a for a in report.acceptance if a.category is None}
    speeds = {(s.metric, s.arm, s.length, s.batch): s for s in report.speed if s.category is None}
    for (arm, length, batch), own in equality.items():
        if arm in (BASELINE, CONTROL):
            continue
        values: dict[str, Any] = {
            "arm": arm,
            "batch": batch,
            "length": length,
            "lossless": own.lossless,
            "equality": own.verdict,
            "identical": own.verdict == "identical",
            "diverged": len(own.divergences),
            "diverged.real": own.num_real,
        }
        for metric, name in _METRIC_NAMES.items():
            values |= _speed_values(name, speeds[metric, arm, length, batch])
        values |= _speed_values("speedup", speeds[PRIMARY, arm, length, batch])
        values |= _acceptance_values(acceptance.get((arm, length, batch)))
        label = arm if length is None else f"{arm}@{length}"
        yield Row(f"{label}, batch {batch}", values)


_OWN_NAMES = ("arm", "batch", "length", "lossless", "equality", "identical", "diverged", "diverged.real")


def result_names() -> list[str]:
    """Every name that a row of results has."""
    nothing = Speed(
        "", "", None, 0, None, math.nan, math.nan, Estimate(math.nan, None, None, 0), None, "undecided", None, None
    )
    names = [*_OWN_NAMES, *_acceptance_values(None)]
    for name in (*_METRIC_NAMES.values(), "speedup"):
        names += _speed_values(name, nothing)
    return names


_METRIC_NAMES = {metric: metric.replace("tokens/s", "throughput") for metric in METRICS}


def _speed_values(name: str, speed: Speed) -> dict[str, Any]:
    ratio = speed.ratio
    found = {
        "": ratio.value,
        ".low": ratio.low,
        ".high": ratio.high,
        ".verdict": speed.verdict,
        ".p": speed.adjusted_p,
        ".detectable": speed.detectable,
    }
    return {f"{name}{key}": value for key, value in found.items()}


def _acceptance_values(acceptance: Acceptance | None) -> dict[str, Any]:
    rate = acceptance.rate if acceptance is not None else None
    length = acceptance.accepted_length if acceptance is not None else None
    requests = acceptance.rate_of_requests if acceptance is not None else None
    found: dict[str, Any] = {}
    for name, estimate in {
        "acceptance.rate": rate,
        "acceptance.rate_of_requests": requests,
        "acceptance.length": length,
    }.items():
        found[name] = estimate.value if estimate is not None else None
        found[f"{name}.low"] = estimate.low if estimate is not None else None
        found[f"{name}.high"] = estimate.high if estimate is not None else None
    found["acceptance.wasted"] = acceptance.wasted if acceptance is not None else None
    return found


_COLUMNS = ("requests", "step_samples", "spans")
"""Sections of which a file holds one list per field: they have thousands of rows."""


def as_data(report: Report) -> dict[str, Any]:
    """Plain data, for JSON; every sample is there."""
    found: dict[str, Any] = {"dovetail_ab": FORMAT}
    for section in fields(report):
        value = getattr(report, section.name)
        found[section.name] = _columns(value) if section.name in _COLUMNS else _plain(value)
    found["definitions"] = {"acceptance": dict(DEFINITIONS), "speed": dict(METRICS)}
    found["results"] = [{"label": row.label, **_plain(row.values)} for row in report.rows()]
    return found


def write_json(report: Report) -> str:
    """The text of report.json."""
    return json.dumps(as_data(report), ensure_ascii=False, allow_nan=False) + "\n"


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    if not rows:
        return {}
    return {field.name: [_plain(getattr(row, field.name)) for row in rows] for field in fields(rows[0])}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        # Infinities and NaN are no JSON; nanoseconds suffice.
        return round(value, 9) if math.isfinite(value) else None
    return value if isinstance(value, int | str | bool) or value is None else str(value)
