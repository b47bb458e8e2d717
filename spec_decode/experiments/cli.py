"""The options of `dovetail ab`; each subcommand imports what it needs when it is called."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dovetail.commands.checks import check_writable, nearest, require, write_text

if TYPE_CHECKING:
    from dovetail.spec_decode.experiments.fail_if import Condition
    from dovetail.spec_decode.experiments.report import Report
    from dovetail.spec_decode.experiments.schema import Experiment


def _is_file(word: str) -> bool:
    return Path(word).suffix in (".yaml", ".yml", ".json", ".toml")


class _FileOrCommand(TyperGroup):
    """`dovetail ab experiment.yaml` is short for `dovetail ab run experiment.yaml`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """As the base class, unless the first argument is a file."""
        if args and args[0] not in self.commands and _is_file(args[0]):
            args = ["run", *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accepts options before the file as well: the first word that is a command or a file decides."""
        if args and args[0].startswith("-") and not set(args) & {"--help", *self.commands} and any(map(_is_file, args)):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_FileOrCommand,
    help="Compare drafters, or any other configs, with equality checks and confidence intervals.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

JSONFile = Annotated[Path | None, typer.Option("--json", help="Write every sample and result to this file.")]
HTMLFile = Annotated[Path | None, typer.Option("--html", help="Write one page with plots, readable offline.")]
CSVFolder = Annotated[
    Path | None,
    typer.Option("--csv", metavar="DIR", help="Write the tables of the report as CSV files to this folder."),
]
FailIf = Annotated[
    str | None,
    typer.Option(
        "--fail-if",
        metavar="CONDITION",
        help="Exit with 1 where it holds for an arm, as in 'lossless == false or speedup.low < 1.0'.",
    ),
]


JournalFile = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        metavar="FILE",
        help="Where each turn is kept as it ends; by default EXPERIMENT.ab.jsonl next to the experiment.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the journal of a run that was stopped or killed.")]
MaxMinutes = Annotated[
    float | None,
    typer.Option(
        "--max-minutes",
        metavar="M",
        help="Begin no round of turns after so many minutes, and report what was measured.",
    ),
]
UntilDecided = Annotated[
    bool,
    typer.Option(
        "--until-decided", help="Run each group of prompts once, and end when every speed-up in tokens/s is decided."
    ),
]
RunBaseline = Annotated[
    str | None,
    typer.Option(
        "--baseline", metavar="ARM", help="The arm that speed is compared with, in place of the experiment's."
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Resolve the arms and say what would run, how long, and what effect it could show; read no weights.",
    ),
]
Earlier = Annotated[
    Path | None,
    typer.Option("--from", metavar="REPORT.json", help="With --check: an earlier report, for times and spread."),
]
Allow = Annotated[
    bool, typer.Option("--allow", help="Let arms differ in more than they name or declare; the report says in what.")
]


@app.command("run")
def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="What to compare; see `ab init`.")],
    json_file: JSONFile = None,
    html_file: HTMLFile = None,
    csv_folder: CSVFolder = None,
    fail_if: FailIf = None,
    allow: Allow = False,
    journal: JournalFile = None,
    resume: Resume = False,
    max_minutes: MaxMinutes = None,
    until_decided: UntilDecided = False,
    baseline: RunBaseline = None,
    check: Check = False,
    earlier: Earlier = None,
) -> None:
    """Run an experiment: every arm in one process, interleaved, on the same prompts."""
    check_writable("--json", json_file)
    check_writable("--html", html_file)
    check_writable("--journal", journal)
    if csv_folder is not None:
        # A folder that is not there is made.
        check_writable("--csv", csv_folder / "results.csv" if csv_folder.is_dir() else csv_folder)
    require(max_minutes is None or max_minutes > 0, f"--max-minutes is {max_minutes}: give more than 0")
    require(check or earlier is None, "--from says what --check foretells: give --check as well, or leave it out")
    from dovetail.spec_decode.experiments.schema import read_experiment

    parsed = read_experiment(experiment)
    if baseline is not None:
        parsed = parsed.model_copy(update={"baseline": baseline})
    condition = None if fail_if is None else _condition(fail_if, parsed)
    folder = experiment.absolute().parent
    if check:
        _print_setup(parsed, folder, allow, earlier, until_decided=until_decided)
        return
    from dovetail.spec_decode.experiments.experiment import Procedure, run_experiment
    from dovetail.spec_decode.experiments.journal import default_journal
    from dovetail.spec_decode.experiments.terminal import print_report

    procedure = Procedure(journal or default_journal(experiment), resume, max_minutes, until_decided)
    report = run_experiment(parsed, folder, procedure, allow=allow)
    _write(report, json_file, html_file, csv_folder)
    print_report(report)
    if condition is not None:
        _judge(condition, report)


def _condition(text: str, experiment: Experiment) -> Condition:
    """The condition of --fail-if. Raises `ConfigError` for names that the experiment's results lack."""
    from dovetail.spec_decode.experiments.fail_if import Condition
    from dovetail.spec_decode.experiments.load.rows import load_names
    from dovetail.spec_decode.experiments.results import result_names

    condition = Condition(text)
    is_of_load = _is_of_load(condition)
    require(not is_of_load or experiment.load is not None, f"--fail-if {text!r}: the experiment has no load")
    condition.check_names(load_names() if is_of_load else result_names())
    return condition


def _is_of_load(condition: Condition) -> bool:
    from dovetail.spec_decode.experiments.load.rows import PREFIX

    return any(name.startswith(PREFIX) for name in condition.names)


def _write(report: Report, json_file: Path | None, html_file: Path | None, csv_folder: Path | None) -> None:
    from dovetail.spec_decode.experiments.export import write_tables
    from dovetail.spec_decode.experiments.page.page import report_page
    from dovetail.spec_decode.experiments.report import as_data, write_json

    if json_file is not None:
        write_text("--json", json_file, write_json(report))
    if html_file is not None:
        write_text("--html", html_file, report_page(report))
    if csv_folder is not None:
        write_tables(as_data(report), csv_folder)


def _judge(condition: Condition, report: Report) -> None:
    """Exits with 1 where the condition holds."""
    failures = condition.failures(report.load_rows() if _is_of_load(condition) else report.rows())
    for failure in failures:
        typer.echo(f"failed: {failure.message}", err=True)
    if failures:
        raise typer.Exit(1)


@app.command("compare")
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="The report to compare with.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="The report that is judged.")],
    allow: Annotated[bool, typer.Option("--allow", help="Compare what different experiments have in common.")] = False,
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with 1 where an arm became worse for certain.")
    ] = False,
    json_file: JSONFile = None,
) -> None:
    """Compare two reports of one experiment: what is better or worse, with intervals."""
    check_writable("--json", json_file)
    from dovetail.spec_decode.experiments.compare import compare_reports, comparison_json
    from dovetail.spec_decode.experiments.saved_report import read_report
    from dovetail.spec_decode.experiments.terminal import print_comparison

    found = compare_reports(read_report(old), read_report(new), (str(old), str(new)), allow=allow)
    if json_file is not None:
        write_text("--json", json_file, comparison_json(found))
    print_comparison(found)
    if fail_on_regression and (worse := [change for change in found.changes if change.verdict == "worse"]):
        typer.echo(f"worse: {', '.join(f'{change.label} {change.what}' for change in worse)}", err=True)
        raise typer.Exit(1)


@app.command("merge")
def merge(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT.json...", help="Reports of one experiment.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result to this file, as JSON.")
    ] = None,
    html_file: HTMLFile = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="ARM", help="The arm that speed is compared with; by default the reports'."),
    ] = None,
) -> None:
    """Put reports of one experiment from several machines together; ratios are paired within each."""
    check_writable("--output", output)
    check_writable("--html", html_file)
    from dovetail.commands import create_console, page
    from dovetail.spec_decode.experiments.merge import merge_reports, merged_json, merged_sections
    from dovetail.spec_decode.experiments.page.page import section_parts
    from dovetail.spec_decode.experiments.saved_report import read_report
    from dovetail.spec_decode.experiments.terminal import print_sections

    merged = merge_reports({str(path): read_report(path) for path in reports}, baseline)
    sections = merged_sections(merged)
    if output is not None:
        write_text("--output", output, merged_json(merged))
    if html_file is not None:
        title = f"dovetail ab: {merged.name}, {len(merged.runs)} runs"
        parts = [part for section in sections for part in section_parts(section)]
        write_text("--html", html_file, page.whole_page(title, [f"<h1>{escape(title)}</h1>", *parts]))
    print_sections(create_console(), sections)


@app.command("table")
def table(
    report: Annotated[Path, typer.Argument(metavar="REPORT.json", help="What --json wrote.")],
    name: Annotated[
        str, typer.Option("--table", help="requests, steps, results, load_requests or load_results.", metavar="NAME")
    ] = "results",
) -> None:
    """Print one table of a report as CSV."""
    from dovetail.spec_decode.experiments.export import TABLES, read_tables, write_table

    require(name in TABLES, f"--table {name!r} is no table; {nearest(name, TABLES)}")
    write_table(read_tables(report), name, sys.stdout)


@app.command("show")
def show(
    report: Annotated[Path, typer.Argument(metavar="REPORT.json", help="What `dovetail ab run --json` wrote.")],
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="ARM", help="The arm that speed is compared with: any, or `arm@4`."),
    ] = None,
) -> None:
    """Compare the arms of a saved report again, with any of them as the baseline. Nothing runs."""
    from dovetail.commands import create_console
    from dovetail.spec_decode.experiments.saved_report import read_report
    from dovetail.spec_decode.experiments.showing import compare_anew
    from dovetail.spec_decode.experiments.speed_section import speed_section
    from dovetail.spec_decode.experiments.terminal import print_headline, print_sections

    compared, headline, label = compare_anew(read_report(report), baseline)
    console = create_console()
    print_sections(console, [speed_section(compared, label)])
    print_headline(console, headline)


@app.command("live")
def live(
    records: Annotated[
        Path, typer.Argument(metavar="RECORDS.jsonl", help="What the telemetry sink `experiments` wrote.")
    ],
    experiment: Annotated[
        str | None, typer.Option("--experiment", help="Which one, where the file has several.", metavar="NAME")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="The arm that others are compared with; by default the first.", metavar="ARM"),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Compare the arms that live traffic was split between (section `experiments` of a config)."""
    check_writable("--json", json_file)
    from dovetail.spec_decode.experiments.live.records import read_live
    from dovetail.spec_decode.experiments.live.report import analyse, live_json, print_live

    report = analyse(read_live(records, experiment), baseline)
    if json_file is not None:
        write_text("--json", json_file, live_json(report))
    print_live(report)


@app.command("init")
def init(
    path: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The file to write.")] = Path(
        "experiment.yaml"
    ),
) -> None:
    """Write an example experiment with comments."""
    from dovetail.spec_decode.experiments.example import EXAMPLE

    require(not path.exists(), f"{path} is there already: give another path, or remove it")
    check_writable("EXPERIMENT.yaml", path)
    write_text("EXPERIMENT.yaml", path, EXAMPLE)
    typer.echo(f"wrote {path}; run it with: dovetail ab {path}")


def _print_setup(parsed: Any, folder: Path, allow: bool, earlier: Path | None, *, until_decided: bool) -> None:
    from dovetail.spec_decode.experiments.admission import check_admission, that_fit
    from dovetail.spec_decode.experiments.arms import baseline_of, prepare
    from dovetail.spec_decode.experiments.datasets import load_prompts
    from dovetail.spec_decode.experiments.foretell import foretell
    from dovetail.spec_decode.experiments.load.plan import foretell_load, read_load_trace
    from dovetail.spec_decode.experiments.saved_report import read_report
    from dovetail.spec_decode.experiments.terminal import print_setup

    data = load_prompts(parsed.workload, folder)
    setup = prepare(parsed, folder, allow=allow)
    check_admission(parsed, setup, data)
    data = that_fit(parsed, setup, data)
    baseline_of(parsed, setup)
    trace = read_load_trace(parsed, folder)
    before = read_report(earlier) if earlier is not None else None
    print_setup(parsed, setup, data)
    for line in foretell(parsed, setup, data, before, until_decided=until_decided).lines():
        typer.echo(line)
    if parsed.workload.skip_too_long and any(prompt.token_ids is None for prompt in data.prompts):
        typer.echo("prompts are texts, and tokenized when it runs: those that are too long then are counted here")
    if parsed.load is not None:
        num_variants = sum(len(engine.variants) for engine in setup.engines)
        typer.echo(foretell_load(parsed.load, trace, num_variants * parsed.repetitions))
