"""Tables and progress in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.commands.machine import noise_warning
from dovetail.plugins.commands.bench.comparison import Comparison
from dovetail.plugins.commands.bench.result import PERCENTILE_DEFINITION, Metric, Result, failure_lines
from dovetail.plugins.commands.bench.stats import PERCENTILES, intervals_of, statistic_of, summarize

_PIPE_WIDTH = 200
_VERDICT_STYLES = {"faster": "green", "slower": "bold red", "undecided": "dim"}


def create_console(*, stderr: bool = False) -> Console:
    """A console that keeps one row per line where its output is no terminal."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


def format_value(value: float | None, unit: str) -> str:
    """A number with its unit, as people read it: "12.3 ms", "45.6 tok/s", "98.0%"."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.1%}"
    if unit != "s":
        return f"{value:,.1f} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"
    if abs(value) >= 1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if abs(value) >= 1e-3 or value == 0 else f"{value * 1e6:.1f} us"


def summary_row(name: str, metric: Metric) -> list[str]:
    """Name, count, mean, percentiles, minimum, maximum."""
    summary = summarize(metric.samples)
    if metric.unit == "share":
        # Yes and no have a mean, and nothing else worth a column.
        return [name, str(summary.count), format_value(summary.mean, metric.unit), *["-"] * (len(PERCENTILES) + 2)]
    values = [summary.mean, *(summary.percentiles[q] for q in PERCENTILES), summary.minimum, summary.maximum]
    return [name, str(summary.count), *(format_value(value, metric.unit) for value in values)]


SUMMARY_HEADER = ["metric", "n", "mean", *(f"p{q}" for q in PERCENTILES), "min", "max"]


def print_result(result: Result) -> None:
    """One table per workload, the definitions, and a warning where the machine was busy."""
    console = create_console()
    for workload, description in result.workloads.items():
        table = Table(title=f"{result.kind}: {workload}", title_justify="left")
        for index, column in enumerate(SUMMARY_HEADER):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        own = {key: metric for key, metric in result.metrics.items() if key.startswith(f"{workload}/")}
        for key, metric in own.items():
            table.add_row(*summary_row(key.removeprefix(f"{workload}/"), metric))
        console.print(table)
        console.print(Text(", ".join(f"{key} {value}" for key, value in description.items()), style="dim"))
        console.print()
    definitions = {key.rpartition("/")[2]: metric.definition for key, metric in result.metrics.items()}
    for name, definition in definitions.items():
        console.print(Text(f"{name}: {definition}", style="dim"))
    console.print(Text(PERCENTILE_DEFINITION, style="dim"))
    _print_noise(result)


def print_served(result: Result, metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    """Of `bench serve`: a table for each server, with 95% intervals, and what has to be known about them.

    `metrics`: latencies that are shown, all where none is given; `percentiles`: of latencies.
    """
    console = create_console()
    columns = ["mean", "median", *(f"p{q:g}" for q in percentiles)]
    for workload in result.workloads:
        table = Table(title=f"{result.kind}: {workload}", title_justify="left")
        for index, column in enumerate(["metric", "n", *(f"{name} (95% interval)" for name in columns)]):
            table.add_column(column, justify="left" if index == 0 else "right")
        for key, metric in result.metrics.items():
            owner, _, name = key.rpartition("/")
            if owner == workload and (metric.unit != "s" or name.partition(" ")[0] in metrics):
                table.add_row(name, str(len(metric.samples)), *_cells(metric, columns))
        console.print(table)
    definitions = {key.rpartition("/")[2]: metric.definition for key, metric in result.metrics.items()}
    for name, definition in definitions.items():
        console.print(Text(f"{name}: {definition}", style="dim"))
    facts = {**result.procedure, **result.client}
    console.print(Text(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim"))
    for comparison in result.comparisons:
        print_comparison(comparison)
    warn([*failure_lines(result), *result.warnings])


def _cells(metric: Metric, columns: Sequence[str]) -> list[str]:
    """The statistics of a metric with their intervals; of rates and shares the mean only."""
    samples, cells = metric.samples, []
    shown = columns if metric.unit == "s" else columns[:1]
    intervals = intervals_of(metric.groups, shown)
    for name in shown:
        if name.startswith("p") and len(samples) * (100 - float(name[1:])) < 100:
            cells.append("-")
            continue
        interval = intervals[name]
        around = "" if interval is None else " ({} to {})".format(*(format_value(v, metric.unit) for v in interval))
        cells.append(format_value(statistic_of(samples, name), metric.unit) + around)
    return cells + ["-"] * (len(columns) - len(cells))


def _print_noise(result: Result) -> None:
    known = [span for span in result.spans if span.others is not None]
    if known:
        worst = max(span.taken for span in known)
        create_console().print(Text(f"Taken by others while timing: at most {worst:.0%} of the machine.", style="dim"))
    warn([warning] if (warning := noise_warning(result.spans)) else [])


def print_comparison(comparison: Comparison) -> None:
    """The rows, with what has to be known about them."""
    console = create_console()
    table = Table(title=f"a: {comparison.a_name}   b: {comparison.b_name}", title_justify="left")
    for column in ("metric", "a", "b", "b / a", "95% interval", "verdict on b"):
        table.add_column(column, justify="left" if column == "metric" else "right", no_wrap=True)
    for row in comparison.rows:
        interval = "-" if row.interval is None else f"{row.interval[0]:.3f} to {row.interval[1]:.3f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}x"
        verdict = Text(row.verdict, style=_VERDICT_STYLES[row.verdict])
        table.add_row(
            f"{row.name} ({row.statistic})",
            format_value(row.a, row.unit),
            format_value(row.b, row.unit),
            ratio,
            interval,
            verdict,
        )
    console.print(table)
    for note in comparison.notes:
        console.print(Text(note, style="dim"))
    warn(comparison.warnings)


def warn(messages: Sequence[str]) -> None:
    """Prints warnings on stderr."""
    for message in messages:
        line = Text.assemble(("warning: ", "bold yellow"), message)
        create_console(stderr=True).print(line, soft_wrap=True)
