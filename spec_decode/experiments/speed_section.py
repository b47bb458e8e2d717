"""The section of a report on speed: ratios to the baseline, of each pair of arms, and by category."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, Estimate
from dovetail.spec_decode.experiments.families import Decision
from dovetail.spec_decode.experiments.schema import CONTROL
from dovetail.spec_decode.experiments.speed import METRICS, PER_REQUEST, PLAIN, PRIMARY, Compared, Pair, Speed
from dovetail.spec_decode.experiments.tables import Section, TableData, format_estimate

Label = Callable[[str, int | None], str]


def speed_section(compared: Compared, label: Label) -> Section:
    """All ratios. `label` is of an arm and its length."""
    baseline = label(*compared.baseline)
    overall = [speed for speed in compared.ratios if speed.category is None]
    tables = [
        _speed_table(
            [s for s in overall if s.metric == metric and not _is_repeated(s, overall)], metric, label, baseline
        )
        for metric in METRICS
    ]
    tables = [table for table in tables if table.rows]
    tables += _pair_table(compared.pairs, label)
    by_category = [speed for speed in compared.ratios if speed.category is not None]
    if by_category:
        tables.append(_category_table(by_category, label))
    return Section("Speed", list(_notes(baseline, is_plain=compared.baseline == PLAIN)), tables)


def _notes(baseline: str, *, is_plain: bool) -> Iterator[str]:
    yield (
        f"Ratios to {baseline}, more than 1 is faster; geometric means over groups of prompts, each group paired with"
        " itself in the same repetition. Intervals: bootstrap-t over groups (the mean over repetitions of each; groups"
        " with turns of the same conversations are one)."
        f" No interval with fewer than {MIN_GROUPS} groups."
    )
    yield (
        "Verdicts: one family of all ratios of the first tables and of all pairs. With probability 95% none of these"
        " without an effect has a verdict (Holm's correction with weights: half for tokens/s, the rest in equal parts"
        " for other metrics and pairs). p: after that correction. An interval is of the level at which its ratio was"
        " tested, at least 95%, so it leaves 1 out if and only if the verdict is faster or slower. Not judged:"
        f" {CONTROL}, which shows the noise, and categories; their intervals are 95% each by itself."
    )
    if not is_plain:
        yield f"{CONTROL} is compared with plain, not with {baseline}."
    yield (
        "to decide: groups of prompts (prompts / batch size) that would decide a ratio like this four times out of"
        " five; detectable: the smallest difference that these groups would decide as often."
    )
    yield from (f"{name}: {text}." for name, text in METRICS.items())


def _is_repeated(speed: Speed, overall: Sequence[Speed]) -> bool:
    """One by one, requests of equal lengths have the same ratio end to end as in tokens/s: nothing new to show."""
    if speed.metric != "e2e" or speed.batch != 1:
        return False
    cell = (speed.arm, speed.length, speed.batch)
    return any(s.metric == PRIMARY and (s.arm, s.length, s.batch) == cell and s.ratio == speed.ratio for s in overall)


def _speed_table(speeds: Sequence[Speed], metric: str, label: Label, baseline: str) -> TableData:
    rows = [
        [
            label(s.arm, s.length),
            str(s.batch),
            speed_value(s.baseline, metric),
            speed_value(s.own, metric),
            *ratio_cells(s.ratio, s.decision),
        ]
        for s in speeds
    ]
    return TableData(["arm", "batch", baseline, "arm's", *ratio_header("groups")], rows, metric)


def _pair_table(pairs: Sequence[Pair], label: Label) -> Iterator[TableData]:
    rows = [
        [
            label(pair.arm, pair.length),
            label(pair.other_arm, pair.other_length),
            str(pair.batch),
            *ratio_cells(pair.ratio, pair.decision),
        ]
        for pair in pairs
    ]
    if rows:
        yield TableData(["arm", "to", "batch", *ratio_header("groups")], rows, f"Arm against arm, {PRIMARY}")


def ratio_header(groups: str) -> list[str]:
    """Of the columns of `ratio_cells`. `groups`: what is drawn."""
    return ["ratio [interval]", "p", groups, "to decide", "detectable", "verdict"]


def ratio_cells(ratio: Estimate, decision: Decision) -> list[str]:
    """A ratio of speeds, and its verdict."""
    return [
        format_estimate(ratio, "{:.3f}"),
        "-" if decision.adjusted_p is None else f"{decision.adjusted_p:.4f}",
        str(ratio.groups),
        "-" if decision.groups_to_decide is None else f"{decision.groups_to_decide:,}",
        "-" if decision.detectable is None else f"{decision.detectable:.1%}",
        decision.verdict,
    ]


def speed_value(value: float, metric: str) -> str:
    """Tokens per second, or milliseconds."""
    if math.isnan(value):
        return "-"
    return f"{value:,.1f}/s" if metric in (PRIMARY, PER_REQUEST) else f"{1e3 * value:,.2f} ms"


def _category_table(speeds: Sequence[Speed], label: Label) -> TableData:
    categories = list(dict.fromkeys(str(s.category) for s in speeds))
    found = {(s.arm, s.length, s.batch, s.category): s for s in speeds}
    variants = list(dict.fromkeys((s.arm, s.length, s.batch) for s in speeds))
    rows = []
    for variant in variants:
        ratios = [found[*variant, c].ratio if (*variant, c) in found else None for c in categories]
        cells = [format_estimate(ratio, "{:.2f}") for ratio in ratios]
        rows.append([label(variant[0], variant[1]), str(variant[2]), *cells])
    title = f"Ratio of {PER_REQUEST} by category [95%, each by itself; not a verdict]"
    return TableData(["arm", "batch", *categories], rows, title)
