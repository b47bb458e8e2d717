"""Plots of a report that `dovetail.commands.svg` has no form for: bars and the grid. Colours are the page's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dovetail.commands.svg import nice_range

_WIDTH, _ROW, _TOP, _RIGHT = 560, 22, 34, 64
_LETTER = 6.4
_BAR_ROW, _BAR_HEIGHT = 46, 26


@dataclass(frozen=True)
class Bar:
    """One row: parts that add up."""

    label: str
    parts: Sequence[float]


def stacked_bars(title: str, names: Sequence[str], bars: Sequence[Bar], unit: str) -> str:
    """Horizontal bars with a legend; the sum is written behind each."""
    left = min(0.45 * _WIDTH, 16 + 6.4 * max(len(bar.label) for bar in bars))
    axis = nice_range([sum(bar.parts) for bar in bars])
    scale = (_WIDTH - left - _RIGHT) / (axis.high - axis.low)
    top = _TOP + 18
    content = _legend(names)
    for row, bar in enumerate(bars):
        y = top + row * _ROW
        content += text_at(left - 8, y + 14, bar.label, "end")
        x = left
        for index, value in enumerate(bar.parts):
            width = max(0.0, value * scale)
            content += (
                f'<rect class="s{index % 6} bar" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 7}">'
                f"<title>{escape(bar.label)}: {escape(names[index])} {value:.3f} {escape(unit)}</title></rect>"
            )
            x += width
        content += text_at(x + 6, y + 14, f"{sum(bar.parts):.2f} {unit}", "start")
    return picture(title, top + _ROW * len(bars) + 8, content)


def _legend(names: Sequence[str]) -> str:
    parts, x = [], 8.0
    for index, name in enumerate(names):
        parts.append(f'<rect class="s{index % 6} bar" x="{x:.1f}" y="{_TOP - 4}" width="10" height="10"/>')
        parts.append(text_at(x + 14, _TOP + 5, name, "start"))
        x += 30 + 6.2 * len(name)
    return "".join(parts)


@dataclass(frozen=True)
class Cell:
    """One cell of a grid."""

    row: int
    column: int
    text: str
    verdict: str
    """CSS class: faster, slower or undecided."""
    strength: float
    """0 to 1: how deep its colour is."""


def heat_grid(title: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Cell]) -> str:
    """A table of coloured cells."""
    left = min(0.4 * _WIDTH, 16 + 6.4 * max(map(len, rows)))
    width = (_WIDTH - left - 8) / len(columns)
    height, top = 30, _TOP + 14
    content = "".join(
        text_at(left + (index + 0.5) * width, top - 6, name, "middle") for index, name in enumerate(columns)
    )
    content += "".join(text_at(left - 8, top + index * height + 19, name, "end") for index, name in enumerate(rows))
    for cell in cells:
        x, y = left + cell.column * width, top + cell.row * height
        content += (
            f'<rect class="{cell.verdict} cell" style="fill-opacity:{0.08 + 0.5 * cell.strength:.2f}" x="{x + 2:.1f}"'
            f' y="{y + 2}" width="{width - 4:.1f}" height="{height - 4}" rx="3"/>'
        )
        content += (
            f'<text class="title" x="{x + width / 2:.1f}" y="{y + 19}" text-anchor="middle">{escape(cell.text)}</text>'
        )
    return picture(title, top + height * len(rows) + 8, content)


def histograms(title: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """A row of bars per label: the share of 1, 2, ..., all rows on one scale."""
    left = min(0.4 * _WIDTH, 16 + _LETTER * max(len(label) for label, _ in rows))
    count = max(len(shares) for _, shares in rows)
    width = (_WIDTH - left - 12) / max(count, 4)
    content = ""
    for row, (label, shares) in enumerate(rows):
        floor = _TOP + (row + 1) * _BAR_ROW - 4
        content += text_at(left - 8, floor - 6, label, "end")
        content += f'<path class="grid" d="M{left:.1f} {floor}H{_WIDTH - 12}"/>'
        for index, share in enumerate(shares):
            x, height = left + index * width, _BAR_HEIGHT * share
            content += (
                f'<rect class="s0 bar" x="{x + 3:.1f}" y="{floor - height:.1f}" width="{width - 6:.1f}"'
                f' height="{height:.1f}"><title>{escape(label)}: {index + 1} tokens in {share:.1%}</title></rect>'
            )
            if share >= 0.005:
                content += text_at(x + width / 2, floor - height - 3, f"{share:.0%}", "middle")
    bottom = _TOP + len(rows) * _BAR_ROW
    content += "".join(
        text_at(left + (index + 0.5) * width, bottom + 12, str(index + 1), "middle") for index in range(count)
    )
    return picture(title, bottom + 20, content)


def text_at(left: float, top: float, text: str, anchor: str, style: str = "") -> str:
    """A text of a picture. `style`: its CSS class."""
    attribute = f' class="{style}"' if style else ""
    return f'<text{attribute} x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def picture(title: str, height: float, content: str, width: int = _WIDTH) -> str:
    """A picture with its title."""
    heading = f'<text class="title" x="8" y="18">{escape(title)}</text>'
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" role="img"'
        f' aria-label="{escape(title, quote=True)}">{heading}{content}</svg>'
    )
