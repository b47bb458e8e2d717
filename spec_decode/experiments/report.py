"""A report: everything that an experiment found, as data, in the order in which it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from dovetail.commands.machine import Span
from dovetail.spec_decode.experiments.acceptance import DEFINITIONS, Acceptance
from dovetail.spec_decode.experiments.cost import CostModel, Crossover, GridCell, StepCost
from dovetail.spec_decode.experiments.equality import Equality
from dovetail.spec_decode.experiments.provenance import Provenance
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord, label_among
from dovetail.spec_decode.experiments.results import ArmStatus, Row, result_rows
from dovetail.spec_decode.experiments.spec_bench import SpecBenchScore
from dovetail.spec_decode.experiments.speed import METRICS, Speed
from dovetail.spec_decode.experiments.trials import Trial

FORMAT = 1


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
    spec_bench: Sequence[SpecBenchScore] = ()
    """Of the data set Spec-Bench alone."""

    def rows(self) -> list[Row]:
        """What `--fail-if` judges; see `dovetail.spec_decode.experiments.results`."""
        return result_rows(self.equality, self.speed, self.acceptance, self.status, self.requests, self.label)

    def label(self, arm: str, length: int | None) -> str:
        """A variant's name in tables."""
        return label_among(self.provenance.arms, arm, length)


_COLUMNS = ("requests", "step_samples", "spans")
"""Sections of which a file holds one list per field: they have thousands of rows."""


def as_data(report: Report) -> dict[str, Any]:
    """Plain data, for JSON; every sample is there."""
    found: dict[str, Any] = {"dovetail_ab": FORMAT}
    for section in fields(report):
        value = getattr(report, section.name)
        found[section.name] = _columns(value) if section.name in _COLUMNS else plain(value)
    found["definitions"] = {"acceptance": dict(DEFINITIONS), "speed": dict(METRICS)}
    found["results"] = [{"label": row.label, **plain(row.values)} for row in report.rows()]
    return found


def write_json(report: Report) -> str:
    """The text of report.json."""
    return json.dumps(as_data(report), ensure_ascii=False, allow_nan=False) + "\n"


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    if not rows:
        return {}
    return {field.name: [plain(getattr(row, field.name)) for row in rows] for field in fields(rows[0])}


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as JSON has them; what is no number becomes None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        # Infinities and NaN are no JSON; nanoseconds suffice.
        return round(value, 9) if math.isfinite(value) else None
    return value if isinstance(value, int | str | bool) or value is None else str(value)
