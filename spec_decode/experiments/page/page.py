"""report.html: one file, tables and SVG plots, no scripts, nothing from the network, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from dovetail.commands import page
from dovetail.spec_decode.experiments.page.report_plots import (
    acceptance_plots,
    forest_plot,
    grid_plots,
    request_plots,
    step_plots,
)
from dovetail.spec_decode.experiments.report import Report
from dovetail.spec_decode.experiments.sections import all_sections
from dovetail.spec_decode.experiments.tables import Section, TableData
from dovetail.spec_decode.experiments.verdict_words import TONES

_STYLE = """<style>.bar { stroke: none; } .cell { stroke: none; } .good { color: var(--c2); }
  .bad { color: var(--c1); font-weight: 600; } .caution { color: #8a5a00; }
  @media (prefers-color-scheme: dark) { .caution { color: var(--c4); } }
  svg .good, svg .bad, svg .caution { fill: currentColor; } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
  table { font-size: 13px; } th, td { padding: .25rem .5rem; white-space: normal; }
  td:first-child { white-space: nowrap; } .facts td { max-width: 62rem; overflow-wrap: anywhere; }
  .verdicts { list-style: none; padding: 0; } .notes { margin: .3rem 0; max-width: 60rem; }</style>"""


def report_page(report: Report) -> str:
    """The page of a report."""
    found = report.provenance
    parts = [
        _STYLE,
        f"<h1>dovetail ab: {escape(found.name)}</h1>",
        f'<p class="soft">{escape(found.date)}, {escape(str(found.machine.get("cpu", "")))}</p>',
        f'<ul class="verdicts">{"".join(f"<li>{escape(line)}</li>" for line in report.headline().lines())}</ul>',
        f'<div class="plots">{forest_plot(report)}</div>',
        *(f'<p class="warning">{escape(text)}</p>' for text in report.warnings),
    ]
    plots = {
        "Acceptance": "".join([*request_plots(report), *acceptance_plots(report)]),
        "Batch x length": "".join(grid_plots(report)),
        "Cost per step": "".join(step_plots(report)),
    }
    for section in all_sections(report):
        parts += section_parts(section, plots.get(section.title, ""))
    parts.append(f"<details><summary>Experiment</summary>{page.plain_data(found.experiment)}</details>")
    parts.append(f"<details><summary>Resolved configs of the arms</summary>{page.plain_data(found.arms)}</details>")
    return page.whole_page(f"dovetail ab: {found.name}", parts)


def section_parts(section: Section, plots: str = "") -> Iterator[str]:
    """A section in HTML."""
    yield f"<h2>{escape(section.title)}</h2>"
    if plots:
        yield f'<div class="plots">{plots}</div>'
    for table in section.tables:
        if table.title:
            yield f"<h3>{escape(table.title)}</h3>"
        yield _table(table)
    for note in section.notes:
        yield f'<p class="soft notes">{escape(note)}</p>'


def _table(data: TableData) -> str:
    rows = []
    for row in data.rows:
        cells = [f'<td class="{TONES[cell]}">' if cell in TONES else "<td>" for cell in row]
        rows.append(f"<tr>{''.join(f'{tag}{escape(cell)}</td>' for tag, cell in zip(cells, row, strict=True))}</tr>")
    body = "".join(rows)
    if any(data.header):
        return page.table(data.header, body)
    return f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'
