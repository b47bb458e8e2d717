"""A result: samples, what they are of, and where they were taken. One JSON file holds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from dovetail.commands.machine import Span
from dovetail.commands.saved import read_saved
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.comparison import Comparison
from dovetail.plugins.commands.bench.stats import flatten, intervals_of, statistic_of, summarize
from dovetail.plugins.commands.bench.timing import RequestTimes

PERCENTILE_DEFINITION = (
    "Percentiles interpolate linearly between order statistics (type 7, numpy's default); one beyond which less than"
    " one sample is expected is not reported."
)


INTERVALS = ("mean", "median", "p90", "p99")
"""Statistics of which a result's file has 95% intervals."""


@dataclass(frozen=True)
class Metric:
    """Samples of one quantity."""

    unit: str
    """"s", "tok/s", "req/s" or "share"."""
    better: Literal["lower", "higher"]
    statistic: Literal["median", "mean"]
    """What represents the samples in comparisons."""
    definition: str
    groups: Sequence[Sequence[float]]
    """Samples by what was repeated independently."""

    @property
    def samples(self) -> list[float]:
        """All samples; at least one."""
        return flatten(self.groups)

    @property
    def value(self) -> float:
        """The statistic of all samples."""
        return statistic_of(self.samples, self.statistic)


@dataclass(frozen=True)
class FailedRequests:
    """Requests of one workload that failed alike."""

    kind: str
    """"http 429", "timeout", ...: see `dovetail.commands.http.Failure`."""
    count: int
    message: str
    """What most of them were told."""


class Result(BaseModel):
    """What a benchmark found. Reading validates, since files come from anywhere."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dovetail_bench: Literal[1] = 1
    kind: str
    """The subcommand."""
    date: str
    """ISO 8601, UTC."""
    workloads: Mapping[str, Mapping[str, Any]]
    """By name; two results of the same workloads have the same here."""
    procedure: Mapping[str, Any]
    """How it was measured: repetitions, warm-up."""
    metrics: Mapping[str, Metric]
    """By "workload/metric"."""
    summaries: Mapping[str, Any] = {}
    """Of the metrics, for readers of the file; derived, never read back."""
    spans: Sequence[Span] = ()
    requests: Sequence[RequestTimes] = ()
    failures: Mapping[str, Sequence[FailedRequests]] = {}
    """Requests without times: by workload, the most frequent kind first."""
    client: Mapping[str, Any] = {}
    """Of requests over HTTP: how busy the client was, and how it counted tokens."""
    comparisons: Sequence[Comparison] = ()
    """Of servers that were measured by turns."""
    warnings: Sequence[str] = ()
    environment: Mapping[str, Any]
    config: Mapping[str, Any]
    """The configuration as it was resolved, with the chosen plugins."""
    definitions: str = PERCENTILE_DEFINITION


def failure_lines(result: Result) -> list[str]:
    """For each workload of which requests failed a line with their number, and one for each kind of failure."""
    lines = []
    for workload, failures in result.failures.items():
        if failures:
            total = sum(failed.count for failed in failures)
            lines.append(f"{workload}: {total} requests failed; latencies are of the others")
        lines += [
            f"{workload}: {failed.count} x {failed.kind}: {' '.join(failed.message.split())}" for failed in failures
        ]
    return lines


def now() -> str:
    """The date of a result."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_json(result: Result) -> str:
    """The text of a result's file."""
    summaries = {
        name: {
            "count": summary.count,
            "mean": summary.mean,
            "min": summary.minimum,
            "max": summary.maximum,
            **{f"p{q}": value for q, value in summary.percentiles.items()},
            "intervals": intervals_of(metric.groups, INTERVALS),
        }
        for name, metric in result.metrics.items()
        for summary in [summarize(metric.samples)]
    }
    return result.model_copy(update={"summaries": summaries}).model_dump_json(indent=1) + "\n"


def read_result(path: Path) -> Result:
    """Reads a result's file. Raises `ConfigError` that says what is wrong with it."""
    remedy = "write one with `dovetail bench ... --json FILE`"
    result = read_saved(Result, path, "result of `dovetail bench` (format 1)", remedy)
    empty = [name for name, metric in result.metrics.items() if not metric.samples]
    if empty:
        raise ConfigError(f"{path}: the metric {empty[0]!r} has no samples; write the result again")
    return result
