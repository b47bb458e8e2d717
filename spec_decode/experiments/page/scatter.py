"""The scatter of prompts: one panel per arm, all with the same axes, so that arms can be compared by eye."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dovetail.commands.svg import Range, nice_range
from dovetail.spec_decode.experiments.page.plots import picture, text_at

_WIDTH, _COLUMNS, _PANEL_HEIGHT = 1140, 3, 190
_TOP, _LEFT, _BOTTOM, _GAP = 30, 44, 30, 40


@dataclass(frozen=True)
class Dot:
    """One prompt."""

    x: float
    y: float
    name: str
    """What a reader sees who points at it."""


@dataclass(frozen=True)
class Panel:
    """The prompts of one arm."""

    label: str
    dots: Sequence[Dot]


def scatter(title: str, panels: Sequence[Panel], x_title: str, y_title: str, *, mark: float) -> str:
    """Dots with a horizontal line at `mark`. Raises `ValueError` without a dot."""
    dots = [dot for panel in panels for dot in panel.dots]
    x_axis = nice_range([dot.x for dot in dots], from_zero=False, count=4)
    y_axis = nice_range([*(dot.y for dot in dots), mark], from_zero=False, count=4)
    columns = min(_COLUMNS, len(panels))
    width = (_WIDTH - _LEFT) / columns - _GAP if columns == _COLUMNS else _WIDTH / _COLUMNS - _GAP - 20
    content = f'<text x="8" y="32">{escape(y_title)} by {escape(x_title)}; each dot is a prompt</text>'
    for index, panel in enumerate(panels):
        left = _LEFT + (index % columns) * (width + _GAP)
        top = _TOP + 30 + (index // columns) * (_PANEL_HEIGHT + _BOTTOM + 18)
        content += _panel(panel, _Place(left, top, width, x_axis, y_axis), index, mark)
    rows = -(-len(panels) // columns)
    return picture(
        title, _TOP + rows * (_PANEL_HEIGHT + _BOTTOM + 18) + 16, content, round(columns * (width + _GAP) + _LEFT)
    )


@dataclass(frozen=True)
class _Place:
    """Where a panel lies in the picture."""

    left: float
    top: float
    width: float
    x_axis: Range
    y_axis: Range

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            self.left + self.width * self.x_axis.place(x),
            self.top + _PANEL_HEIGHT * (1 - self.y_axis.place(y)),
        )


def _panel(panel: Panel, place: _Place, style: int, mark: float) -> str:
    floor, right = place.top + _PANEL_HEIGHT, place.left + place.width
    content = f'<text class="title" x="{place.left:.1f}" y="{place.top - 6:.1f}">{escape(panel.label)}</text>'
    for tick in place.y_axis.ticks:
        _, top = place.at(place.x_axis.low, tick)
        content += f'<path class="grid" d="M{place.left:.1f} {top:.1f}H{right:.1f}"/>'
        content += text_at(place.left - 5, top + 4, f"{tick:g}", "end")
    for tick in place.x_axis.ticks:
        left, _ = place.at(tick, place.y_axis.low)
        content += text_at(left, floor + 15, f"{tick:g}", "middle")
    _, line = place.at(place.x_axis.low, mark)
    content += f'<path class="mark" d="M{place.left:.1f} {line:.1f}H{right:.1f}"/>'
    for dot in panel.dots:
        left, top = place.at(dot.x, dot.y)
        content += (
            f'<circle class="s{style % 6} dot" cx="{left:.1f}" cy="{top:.1f}" r="3.5">'
            f"<title>{escape(dot.name)}: {dot.x:.2f}, {dot.y:.2f}</title></circle>"
        )
    return content
