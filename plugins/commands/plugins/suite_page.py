"""The page of `dovetail plugins test`, from its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dovetail.commands.page import facts, plain_data, table, whole_page

_OUTCOMES = (
    *(("hung", "slower"), ("died", "slower"), ("failed", "slower"), ("quirk", "undecided")),
    *(("skipped", "undecided"), ("not run", "undecided"), ("passed", "faster")),
)
"""With the class of the page's style."""


def suite_page(report: Mapping[str, Any]) -> str:
    """Returns the whole HTML file of a report as it was written to JSON: what fails first, every case last."""
    results: Sequence[Mapping[str, Any]] = report["results"]
    by_outcome = {name: [each for each in results if each["outcome"] == name] for name, _ in _OUTCOMES}
    title = f"{report['plugin']}: conformance as a plugin of kind {report['kind']}"
    parts = [f"<h1>{escape(title)}</h1>", _verdict(by_outcome), _facts(report)]
    if failures := [*by_outcome["hung"], *by_outcome["died"], *by_outcome["failed"]]:
        parts.append("<h2>Failures</h2>")
        parts += [f"<h3>{escape(each['name'])}</h3><pre>{escape(each['text'])}</pre>" for each in failures]
    if by_outcome["quirk"]:
        rows = "".join(_row(escape(each["name"]), escape(each["text"])) for each in by_outcome["quirk"])
        parts += ["<h2>Quirks</h2>", table(["test", "known deviation"], rows)]
    if report["hints"]:
        rows = "".join(_row(escape(each["capability"]), str(len(each["tests"]))) for each in report["hints"])
        parts += [
            "<h2>Hints</h2><p>The plugin does not declare these capabilities, and passes their tests.</p>",
            table(["could be declared", "tests that pass"], rows),
        ]
    if by_outcome["skipped"]:
        parts += ["<h2>Skipped</h2>", table(["why", "tests"], _reasons(by_outcome["skipped"]))]
    rows = "".join(
        _row(escape(each["name"]), f'<span class="{style}">{name}</span>', f"{each['seconds']:.2f}")
        for name, style in _OUTCOMES
        for each in by_outcome[name]
    )
    parts += ["<h2>All tests</h2>", table(["test", "outcome", "seconds"], rows)]
    parts += ["<h2>Set-up</h2>", plain_data({"attributes": report["attributes"], "versions": report["versions"]})]
    return whole_page(title, parts)


def _verdict(by_outcome: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    counts = {name: len(by_outcome[name]) for name, _ in _OUTCOMES}
    if ended := [name for name in ("hung", "died") if counts[name]]:
        said = f"The suite {ended[0]}: {counts['not run']} of {sum(counts.values())} tests did not run."
        style = "slower"
    elif not sum(counts.values()):
        said, style = "No test ran.", "slower"
    elif counts["failed"]:
        said, style = f"{counts['failed']} of {sum(counts.values())} tests fail.", "slower"
    else:
        said, style = "It keeps the contract.", "faster"
        if counts["quirk"]:
            said = f"It keeps the contract but for {counts['quirk']} known deviations."
    rest = ", ".join(f"{name} {counts[name]}" for name in ("passed", "failed", "quirk", "skipped", *ended))
    return f'<p><strong class="{style}">{said}</strong> <span class="soft">{rest}.</span></p>'


def _facts(report: Mapping[str, Any]) -> str:
    return facts(
        {
            "plugin": report["reference"],
            "distribution": report["distribution"] or "none: a file or module",
            "contract": f"{report['kind']} {report['contract']}",
            "suite": report["suite"],
            "Dovetail": report["versions"]["dovetail"],
            "machine": report["machine"],
            "time": report["time"],
        }
    )


def _reasons(skipped: Sequence[Mapping[str, Any]]) -> str:
    """A row for each reason, with how many tests it skips."""
    counts: dict[str, int] = {}
    for each in skipped:
        counts[each["text"]] = counts.get(each["text"], 0) + 1
    return "".join(_row(escape(reason), str(count)) for reason, count in counts.items())


def _row(*cells: str) -> str:
    """Of cells of HTML."""
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
