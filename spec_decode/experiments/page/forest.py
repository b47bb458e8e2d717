"""The forest plot: every arm's ratios with their intervals and verdicts, a panel per metric, and that on its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dovetail.spec_decode.experiments.page.plots import picture, text_at
from dovetail.spec_decode.experiments.verdict_words import TONES

_WIDTH, _ROW, _TOP, _HEADER = 1140, 24, 30, 20
_PANEL_GAP, _NUMBERS, _LETTER = 26, 132, 6.4
_LEGEND = {"faster": "faster", "slower": "slower", "undecided": "undecided or not judged"}


@dataclass(frozen=True)
class Row:
    """What a row is of."""

    label: str
    tokens: str
    """The verdict on its tokens."""


@dataclass(frozen=True)
class Effect:
    """One ratio of a forest plot, with its interval where it has one."""

    ratio: float
    ends: tuple[float, float] | None
    verdict: str
    """CSS class: faster, slower or undecided."""


def forest(title: str, rows: Sequence[Row], panels: Mapping[str, Sequence[Effect | None]]) -> str:
    """Ratios on logarithmic axes with a line at 1: a row per arm, a panel per metric, numbers behind each interval, and
    last the verdicts on tokens. What lies outside a panel's axis ends in an arrow."""
    left = min(0.3 * _WIDTH, 16 + _LETTER * max(len(row.label) for row in rows))
    right = 8 + _LETTER * max(len("tokens"), *(len(row.tokens) for row in rows))
    width = (_WIDTH - left - right) / len(panels) - _PANEL_GAP
    bottom = _TOP + _HEADER + _ROW * len(rows)
    content = _legend() + _title_at(_WIDTH - right, "tokens")
    for index, row in enumerate(rows):
        middle = _TOP + _HEADER + (index + 0.5) * _ROW
        content += f'<path class="grid" d="M0 {middle + _ROW / 2:.1f}H{_WIDTH}"/>'
        content += text_at(left - 8, middle + 4, row.label, "end")
        content += text_at(_WIDTH - right, middle + 4, row.tokens, "start", TONES.get(row.tokens, ""))
    for index, (metric, effects) in enumerate(panels.items()):
        start = left + index * (width + _PANEL_GAP)
        content += _title_at(start, metric)
        content += _panel(effects, start, width - _NUMBERS, bottom)
    return picture(title, bottom + 24, content, _WIDTH)


def _title_at(left: float, text: str) -> str:
    return f'<text class="title" x="{left:.1f}" y="{_TOP + 10}">{escape(text)}</text>'


def _legend() -> str:
    """What the colours of intervals mean, at the right of the picture's title."""
    content, right = "", float(_WIDTH)
    for verdict, words in reversed(_LEGEND.items()):
        right -= 16 + _LETTER * len(words)
        content += f'<circle class="{verdict} dot" cx="{right:.1f}" cy="14" r="4"/>'
        content += text_at(right + 8, 18, words, "start")
    return content


def _panel(effects: Sequence[Effect | None], start: float, width: float, bottom: float) -> str:
    furthest = _furthest([effect for effect in effects if effect is not None])

    def across(ratio: float) -> float:
        place = 0.5 + 0.5 * math.log(ratio) / math.log(furthest)
        return start + width * min(1.0, max(0.0, place))

    content = f'<path class="mark" d="M{across(1):.1f} {_TOP + _HEADER}V{bottom}"/>'
    for tick in (1 / furthest, 1.0, furthest):
        content += text_at(across(tick), bottom + 16, f"{tick:.2g}", "middle")
    for row, effect in enumerate(effects):
        middle = _TOP + _HEADER + (row + 0.5) * _ROW
        if effect is None:
            content += text_at(start + width + 10, middle + 4, "not measured", "start")
            continue
        if effect.ends is not None:
            low, high = effect.ends
            content += f'<path class="{effect.verdict} line" d="M{across(low):.1f} {middle:.1f}H{across(high):.1f}"/>'
            content += _arrow(low < 1 / furthest, across(low), middle, -5, effect.verdict)
            content += _arrow(high > furthest, across(high), middle, 5, effect.verdict)
        content += f'<circle class="{effect.verdict} dot" cx="{across(effect.ratio):.1f}" cy="{middle:.1f}" r="4">'
        content += f"<title>{_LEGEND[effect.verdict]}</title></circle>"
        content += text_at(start + width + 10, middle + 4, _numbers(effect), "start")
    return content


def _furthest(effects: Sequence[Effect]) -> float:
    """The right end of a panel's axis, whose left end is its inverse: all ratios, and intervals up to a factor of 4."""
    needed = [abs(math.log(effect.ratio)) for effect in effects]
    for effect in effects:
        needed += [min(abs(math.log(end)), math.log(4)) for end in effect.ends or () if end > 0]
    most = math.exp(max(needed, default=0.0))
    return next((end for end in (1.1, 1.25, 1.5, 2.0, 3.0, 4.0) if most <= end), most)


def _arrow(is_outside: bool, left: float, middle: float, length: float, style: str) -> str:
    if not is_outside:
        return ""
    return f'<path class="{style}" d="M{left + length:.1f} {middle:.1f}l{-length} -4v8z"/>'


def _numbers(effect: Effect) -> str:
    ends = "" if effect.ends is None else f" [{effect.ends[0]:.2f}, {effect.ends[1]:.2f}]"
    return f"{effect.ratio:.2f}{ends}"
