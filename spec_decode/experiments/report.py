"""A report: everything that an experiment found, as data, in the order in which it is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dovetail.commands.machine import Span
from dovetail.spec_decode.experiments.acceptance import DEFINITIONS, Acceptance
from dovetail.spec_decode.experiments.columns import plain, to_columns
from dovetail.spec_decode.experiments.cost import CostModel, Crossover, GridCell, StepCost
from dovetail.spec_decode.experiments.equality import Equality
from dovetail.spec_decode.experiments.headline import Headline, make_headline
from dovetail.spec_decode.experiments.load.results import LoadReport
from dovetail.spec_decode.experiments.load.rows import load_rows
from dovetail.spec_decode.experiments.provenance import Provenance
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord, label_among
from dovetail.spec_decode.experiments.results import ArmStatus, Row, result_rows
from dovetail.spec_decode.experiments.spec_bench import SpecBenchScore
from dovetail.spec_decode.experiments.speed import METRICS, PLAIN, Compared, Pair, Speed, VariantKey
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
    """All that the terminal and the page show."""
    requests: Sequence[RequestRecord]
    step_samples: Sequence[StepRecord]
    spans: Sequence[Span]
    spec_bench: Sequence[SpecBenchScore] = ()
    """Of the data set Spec-Bench alone."""
    pairs: Sequence[Pair] = ()
    """Of tokens/s, every variant against every other one but the baseline."""
    baseline: VariantKey = PLAIN
    """What speed is compared with."""
    load: LoadReport | None = None
    """Where the experiment has one."""

    def rows(self) -> list[Row]:
        """What `--fail-if` judges; see `dovetail.spec_decode.experiments.results`."""
        return result_rows(self.equality, self.speed, self.acceptance, self.status, self.requests, self.label)

    def load_rows(self) -> list[Row]:
        """Likewise, of an open-loop load: for conditions that name `load.`."""
        return load_rows(self.load, self.status, self.label) if self.load is not None else []

    def headline(self) -> Headline:
        """The verdicts in a few lines."""
        compared = Compared(self.baseline, self.speed, self.pairs)
        equality = {(e.arm, e.length, e.batch): e.verdict for e in self.equality}
        left_out = [self.label(status.arm, status.length) for status in self.status if not status.ran]
        return make_headline(compared, equality, self.label, left_out, len(self.warnings))

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
        found[section.name] = to_columns(value) if section.name in _COLUMNS else plain(value)
    found["definitions"] = {"acceptance": dict(DEFINITIONS), "speed": dict(METRICS)}
    found["results"] = [{"label": row.label, **plain(row.values)} for row in (*report.rows(), *report.load_rows())]
    return found


def write_json(report: Report) -> str:
    """The text of report.json."""
    return json.dumps(as_data(report), ensure_ascii=False, allow_nan=False) + "\n"
