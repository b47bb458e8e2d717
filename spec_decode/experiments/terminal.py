"""A report, a comparison and a plan in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.commands import create_console, print_warning
from dovetail.spec_decode.experiments.arms import Setup
from dovetail.spec_decode.experiments.bootstrap import Estimate
from dovetail.spec_decode.experiments.compare import Comparison
from dovetail.spec_decode.experiments.datasets import DataSet
from dovetail.spec_decode.experiments.headline import Headline
from dovetail.spec_decode.experiments.plan import num_turns
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.schema import Experiment
from dovetail.spec_decode.experiments.sections import all_sections
from dovetail.spec_decode.experiments.tables import Section, TableData
from dovetail.spec_decode.experiments.verdict_words import TONES, Tone

_STYLES: Mapping[Tone, str] = {"good": "green", "bad": "bold red", "caution": "yellow", "soft": "dim"}


def print_report(report: Report) -> None:
    """All sections, the warnings, each arm in one line, and last the few lines that matter."""
    console = create_console()
    print_sections(console, all_sections(report))
    for warning in report.warnings:
        print_warning(warning)
    print_headline(console, report.headline())


def print_headline(console: Console, headline: Headline) -> None:
    """Each arm in one line, then the headline."""
    console.print(Text("Verdicts", style="bold"))
    for arm in headline.arms:
        console.print(Text(arm.text, style="dim"))
    console.print()
    for line in headline.lines():
        console.print(Text(line))


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Titles, tables and notes."""
    for section in sections:
        console.print(Text(section.title, style="bold"))
        for table in section.tables:
            _print_table(console, table)
        for note in section.notes:
            console.print(Text(note, style="dim"))
        console.print()


def verdict_text(verdict: str, ratio: Estimate) -> str:
    """A verdict on a ratio in a few words."""
    interval = "no interval" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
    return f"{verdict}, {ratio.value:.3f}x ({interval})"


def print_comparison(comparison: Comparison) -> None:
    """The changes, and what else is not the same."""
    console = create_console()
    rows = [
        [change.label, change.what, _cell(change.old), _cell(change.new), _interval(change.estimate), change.verdict]
        for change in comparison.changes
    ]
    header = ["arm", "quantity", "old", "new", "change [interval]", "verdict"]
    _print_table(console, TableData(header, rows, f"old: {comparison.old}   new: {comparison.new}"))
    console.print(
        Text(
            "Speed-ups are over the plain arm of the same run; changes are new / old for speed-ups and new - old for"
            " acceptance, paired by prompts, Holm-corrected within each of speed and acceptance. same: no value"
            " differs.",
            style="dim",
        )
    )
    for difference in comparison.differences:
        console.print(Text(f"differs: {difference}", style="dim"))


def print_setup(experiment: Experiment, setup: Setup, data: DataSet) -> None:
    """Prints what would run."""
    console = create_console()
    console.print(f"{data.name}: {data.num_requests} prompts ({data.format})")
    num_variants = sum(len(engine.variants) for engine in setup.engines)
    turns = num_turns(experiment, num_variants, data.num_requests)
    console.print(f"{turns} groups will run, warm-up included, of {num_variants} arms and lengths")
    for index, engine in enumerate(setup.engines):
        console.print(f"engine {index + 1}: {', '.join(variant.label for variant in engine.variants)}")
    rows = [
        [line.key, *("-" if value is None else str(value) for value in (line.values.get(arm) for arm in setup.arms))]
        for line in setup.differences
    ]
    _print_table(console, TableData(["key", *setup.arms], rows, "Differences between arms, resolved"))
    for arm, reason in setup.refused.items():
        print_warning(f"{arm} is refused: {reason}")
    for note in setup.notes:
        console.print(Text(note, style="dim"))


def _print_table(console: Console, data: TableData) -> None:
    table = Table(title=data.title or None, title_justify="left", show_header=any(data.header))
    for index, name in enumerate(data.header):
        table.add_column(name, justify="left" if index == 0 or not any(data.header) else "right", overflow="fold")
    for row in data.rows:
        table.add_row(*(Text(cell, style=_STYLES[TONES[cell]] if cell in TONES else "") for cell in row))
    console.print(table)


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f} [-]"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
