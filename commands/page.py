"""HTML pages of commands: one file, tables and SVG, no scripts, nothing from the network, light and dark.

The style has the classes of `dovetail.commands.svg`, and `soft`, `warning`, `faster`, `slower` and `undecided`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667085; --grid: #e4e7ec; --paper: #fff;
  --c0: #2563eb; --c1: #d9480f; --c2: #087f5b; --c3: #9333ea; --c4: #b7791f; --c5: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --grid: #344054; --paper: #12161c;
  --c0: #7aa2ff; --c1: #ff9466; --c2: #4fd1a5; --c3: #c99bff; --c4: #e6c067; --c5: #5fd0e6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child, .facts td { text-align: left; white-space: normal; }
.soft, dd { color: var(--soft); } .warning { border-left: 4px solid var(--c1); padding: .4rem .8rem; }
.plots { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1rem; } svg { max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.grid { stroke: var(--grid); fill: none; } .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 2; } .dot { fill-opacity: .75; stroke: none; }
.s0 { stroke: var(--c0); fill: var(--c0); } .s1 { stroke: var(--c1); fill: var(--c1); }
.s2 { stroke: var(--c2); fill: var(--c2); } .s3 { stroke: var(--c3); fill: var(--c3); }
.s4 { stroke: var(--c4); fill: var(--c4); } .s5 { stroke: var(--c5); fill: var(--c5); }
.line.s0, .line.s1, .line.s2, .line.s3, .line.s4, .line.s5 { fill: none; }
.faster { stroke: var(--c2); fill: var(--c2); color: var(--c2); }
.slower { stroke: var(--c1); fill: var(--c1); color: var(--c1); }
.undecided { stroke: var(--soft); fill: var(--soft); color: var(--soft); }
pre { overflow-x: auto; font-size: 12px; }
"""


def whole_page(title: str, parts: Sequence[str]) -> str:
    """Returns a whole HTML file."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def table(header: Sequence[str], body: str) -> str:
    """Returns a table of header cells (text) and a body of `<tr>` rows (HTML)."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(facts: Mapping[str, Any]) -> str:
    """Returns a table of two columns: names and values."""
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(_plain(value))}</td></tr>" for key, value in facts.items())
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'


def plain_data(data: Any) -> str:
    """Returns plain data as indented JSON."""
    return f"<pre>{escape(json.dumps(data, indent=1, default=str))}</pre>"


def _plain(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, Mapping) else str(value)
