"""Times of the parts of a step, and a cost model fitted to them.

The model is that of Leviathan et al. (2023), section 3.3, with measured parts: a round that drafts k tokens for b
requests computes b (1 + k') rows (k' of them drafts, those that the drafter really gave), takes

    T(b, k) = host(b) + forward(rows) + sample(b, k) + draft(b, k)

and brings L tokens per request, so that decoding speeds up by L T(b, 0) / T(b, k). forward(rows) is a line fitted over
all steps that only decode or verify; host, sample and draft are lines in b, and L and k' are those of the smallest
batch. So the prediction knows one batch size's acceptance and the machine's lines: where it meets the measured grid,
these explain the grid, and where the lines lead on to larger batches, it says where speculation stops
paying. That takes two batch sizes at least: one has no slope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.spec_decode.experiments.acceptance import Acceptance
from dovetail.spec_decode.experiments.records import StepRecord
from dovetail.spec_decode.experiments.schema import BASELINE
from dovetail.spec_decode.experiments.speed import PRIMARY, Speed

_LARGEST_BATCH = 1024
_TRIM = 0.1
"""Share of the slowest and of the fastest steps that fits leave out: a step that another process interrupted is no
measurement of the machine."""


@dataclass(frozen=True)
class StepCost:
    """Mean milliseconds per step of one variant at one batch size, steps that compute prompts left out."""

    arm: str
    length: int | None
    batch: int
    steps: int
    draft: float
    verify: float
    """Forward pass over drafts and last tokens, or over last tokens alone."""
    sample: float
    """Sampling, or verifying drafts."""
    prepare: float
    schedule: float
    """Scheduling, planning, committing, handing over to workers."""
    total: float
    rows: float
    """Number of rows computed per step."""
    wasted: float
    """Draft tokens per step that were verified and rejected."""
    kv_blocks_peak: int
    """Largest number of KV blocks in use."""


def describe_steps(steps: Sequence[StepRecord]) -> list[StepCost]:
    """Returns the step costs of every variant at each batch size."""
    found: dict[tuple[int, str, int | None], list[StepRecord]] = {}
    for step in steps:
        found.setdefault((step.batch, step.arm, step.length), []).append(step)
    return [_describe(key, own) for key, own in found.items()]


def _describe(key: tuple[int, str, int | None], steps: Sequence[StepRecord]) -> StepCost:
    batch, arm, length = key
    decode = [step for step in steps if step.prompt_tokens == 0] or list(steps)

    def mean(values: Sequence[float]) -> float:
        return float(sum(values) / len(values))

    return StepCost(
        arm,
        length,
        batch,
        len(decode),
        draft=mean([s.draft for s in decode]),
        verify=mean([s.forward for s in decode]),
        sample=mean([s.sample for s in decode]),
        prepare=mean([s.prepare for s in decode]),
        schedule=mean([s.host for s in decode]),
        total=mean([s.total for s in decode]),
        rows=mean([_rows(s) for s in decode]),
        wasted=mean([s.drafted - s.accepted for s in decode]),
        kv_blocks_peak=max(s.kv_blocks for s in steps),
    )


def _requests(step: StepRecord) -> int:
    """Requests that took part in a step without prompts: each brings its accepted drafts and one token."""
    return max(1, step.tokens - step.accepted)


def _rows(step: StepRecord) -> int:
    return _requests(step) + step.drafted


@dataclass(frozen=True)
class Line:
    """a + b x, from a least-squares fit; never negative parts."""

    start: float
    slope: float

    def at(self, x: float) -> float:
        """Returns the curve's value."""
        return self.start + self.slope * x


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Least squares over the trimmed means of the points at each x, weighted by their numbers. A slope or a start
    below zero is set to zero: no cost falls with more work."""
    groups: dict[float, list[float]] = {}
    for x, y in points:
        groups.setdefault(x, []).append(y)
    xs = np.array(list(groups))
    ys = np.array([_trimmed(values) for values in groups.values()])
    weights = np.array([float(len(values)) for values in groups.values()])
    if len(xs) == 1:
        return Line(float(ys[0]), 0.0)
    middle_x, middle_y = np.average(xs, weights=weights), np.average(ys, weights=weights)
    slope = np.average((xs - middle_x) * (ys - middle_y), weights=weights) / np.average(
        (xs - middle_x) ** 2, weights=weights
    )
    slope = max(0.0, float(slope))
    start = float(middle_y - slope * middle_x)
    if start >= 0:
        return Line(start, slope)
    return Line(0.0, float(np.average(xs * ys, weights=weights) / np.average(xs**2, weights=weights)))


def _trimmed(values: Sequence[float]) -> float:
    ordered = sorted(values)
    cut = int(len(ordered) * _TRIM)
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def expected_length(rate: float, drafts: int) -> float:
    """Mean tokens per round, bonus token included, where each of so many drafts is accepted with probability `rate` if
    all before it were (Leviathan et al. 2023, equation 1): (1 - rate ** (k + 1)) / (1 - rate)."""
    return sum(rate**position for position in range(drafts + 1))


@dataclass(frozen=True)
class CostModel:
    """The lines of one variant's steps. Milliseconds."""

    arm: str
    length: int
    forward: Line
    """Forward pass by rows."""
    plain_rest: Line
    """Host, preparation and sampling of plain steps, by requests."""
    rest: Line
    """Host, preparation and sampling of this variant's steps, by requests."""
    draft: Line
    """Drafting by requests."""
    accepted_length: float
    drafted_per_step: float
    batches: Sequence[int]
    """Batch sizes at which both this variant and plain were measured. One alone gives no slope by requests."""

    def speedup(self, batch: int) -> float:
        """Returns the predicted speedup of decoding."""
        plain = self.plain_rest.at(batch) + self.forward.at(batch)
        rows = batch * (1 + self.drafted_per_step)
        own = self.rest.at(batch) + self.forward.at(rows) + self.draft.at(batch)
        return self.accepted_length * plain / own

    def crossover(self) -> int | None:
        """Returns the smallest batch at which the model predicts no gain; None if there is none up to 1,024, or if it
        was fitted to one batch size only, which does not predict others."""
        if len(self.batches) < 2:
            return None
        return next((b for b in range(1, _LARGEST_BATCH + 1) if self.speedup(b) <= 1), None)


def fit_models(steps: Sequence[StepRecord], acceptance: Sequence[Acceptance]) -> list[CostModel]:
    """Fits one model per variant that drafted tokens."""
    decode = [step for step in steps if step.prompt_tokens == 0]
    plain = [step for step in decode if step.arm == BASELINE]
    first: dict[tuple[str, int | None], Acceptance] = {}
    for item in sorted(acceptance, key=lambda a: a.batch):
        if item.category is None:
            first.setdefault((item.arm, item.length), item)
    models = []
    for (arm, length), found in first.items():
        own = [step for step in decode if (step.arm, step.length) == (arm, length)]
        if length is None or found.accepted_length is None or not own or not plain:
            continue
        models.append(
            CostModel(
                arm,
                length,
                forward=fit_line([(_rows(s), s.forward) for s in [*plain, *own]]),
                plain_rest=fit_line([(_requests(s), s.total - s.forward - s.draft) for s in plain]),
                rest=fit_line([(_requests(s), s.total - s.forward - s.draft) for s in own]),
                draft=fit_line([(_requests(s), s.draft) for s in own]),
                accepted_length=found.accepted_length.value,
                drafted_per_step=found.drafted_per_step or 0.0,
                batches=sorted({s.batch for s in own} & {s.batch for s in plain}),
            )
        )
    return models


@dataclass(frozen=True)
class GridCell:
    """One variant at one batch size: measured and predicted."""

    arm: str
    length: int
    batch: int
    speedup: float
    """Measured tokens per second."""
    low: float | None
    high: float | None
    decode_speedup: float | None
    """Measured ITL, which the model predicts."""
    predicted: float | None


@dataclass(frozen=True)
class Crossover:
    """The batch size at which a variant stops paying."""

    arm: str
    length: int
    measured: int | None
    """The smallest batch of the grid whose interval lies below 1; None where there is none."""
    not_shown: Sequence[int]
    """Batches of the grid before it whose interval holds 1: neither a gain nor its end."""
    without_interval: Sequence[int]
    """Batches of the grid with too few groups for an interval."""
    predicted: int | None
    """The smallest batch at which the model predicts no gain; None: none up to 1,024, or no prediction."""
    predicted_from: Sequence[int]
    """Batch sizes that the model's lines come from; with fewer than two there is no prediction."""


def describe_grid(speeds: Sequence[Speed], models: Sequence[CostModel]) -> tuple[list[GridCell], list[Crossover]]:
    """Returns the batch x length grid, and the crossover of each variant."""
    models_of: Mapping[tuple[str, int], CostModel] = {(m.arm, m.length): m for m in models}
    itl = {(s.arm, s.length, s.batch): s.ratio.value for s in speeds if s.metric == "itl" and s.category is None}
    cells = []
    for speed in speeds:
        if speed.metric != PRIMARY or speed.category is not None or speed.length is None:
            continue
        model = models_of.get((speed.arm, speed.length))
        cells.append(
            GridCell(
                speed.arm,
                speed.length,
                speed.batch,
                speed.ratio.value,
                speed.ratio.low,
                speed.ratio.high,
                itl.get((speed.arm, speed.length, speed.batch)),
                model.speedup(speed.batch) if model is not None else None,
            )
        )
    variants = dict.fromkeys((cell.arm, cell.length) for cell in cells)
    crossovers = []
    for arm, length in variants:
        own = sorted((c for c in cells if (c.arm, c.length) == (arm, length)), key=lambda c: c.batch)
        measured = next((c.batch for c in own if c.high is not None and c.high < 1), None)
        before = [c for c in own if measured is None or c.batch < measured]
        model = models_of.get((arm, length))
        crossovers.append(
            Crossover(
                arm,
                length,
                measured,
                not_shown=[c.batch for c in before if c.low is not None and c.low <= 1],
                without_interval=[c.batch for c in own if c.low is None],
                predicted=model.crossover() if model is not None else None,
                predicted_from=model.batches if model is not None else (),
            )
        )
    return cells, crossovers
