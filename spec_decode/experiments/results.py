"""The results by name, one row per variant and batch size: what `--fail-if` judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.spec_decode.experiments.acceptance import Acceptance
from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, Estimate
from dovetail.spec_decode.experiments.equality import Equality
from dovetail.spec_decode.experiments.records import RequestRecord, label_of
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import METRICS, PRIMARY, Speed


@dataclass(frozen=True)
class ArmStatus:
    """Whether a variant ran."""

    arm: str
    length: int | None
    ran: bool
    reason: str
    """Why not; or what went wrong although it ran."""


@dataclass(frozen=True)
class Row:
    """One variant at one batch size, as names for expressions; or an arm that was left out."""

    label: str
    values: Mapping[str, Any]
    """Dotted name -> number, text, true, false, or None."""
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    """Why values are None, where they would be known had they been measured."""


_OWN_NAMES = (
    "arm",
    "batch",
    "length",
    "ran",
    "drafter_error",
    "lossless",
    "equality",
    "identical",
    "diverged",
    "diverged.real",
    "diverged.control",
    "diverged.p",
)
_SPEED_NAMES = {**{metric: metric.replace("tokens/s", "throughput") for metric in METRICS}, "speedup": "speedup"}
_SPEED_PARTS = ("", ".low", ".high", ".verdict", ".p", ".detectable")
_NEEDS_INTERVAL = (".low", ".high", ".p", ".detectable")
_ACCEPTANCE_NAMES = ("acceptance.rate", "acceptance.rate_of_requests", "acceptance.length")


def result_names() -> list[str]:
    """Every name that a row has."""
    speed = [f"{name}{part}" for name in _SPEED_NAMES.values() for part in _SPEED_PARTS]
    acceptance = [f"{name}{part}" for name in _ACCEPTANCE_NAMES for part in ("", ".low", ".high")]
    return [*_OWN_NAMES, *acceptance, "acceptance.wasted", *speed]


def result_rows(
    equality: Sequence[Equality],
    speed: Sequence[Speed],
    acceptance: Sequence[Acceptance],
    status: Sequence[ArmStatus],
    requests: Sequence[RequestRecord],
    label: Callable[[str, int | None], str] = label_of,
) -> list[Row]:
    """Every variant that ran at each batch size but the baseline and its control, then the arms that were left out."""
    accepted = {(a.arm, a.length, a.batch): a for a in acceptance if a.category is None}
    speeds = {(s.metric, s.arm, s.length, s.batch): s for s in speed if s.category is None}
    failed = {(r.arm, r.length, r.batch) for r in requests if r.drafter_error is not None}
    rows = []
    for own in equality:
        if own.arm in (BASELINE, CONTROL):
            continue
        cell = (own.arm, own.length, own.batch)
        parts = [_own_values(own, cell in failed), _acceptance_values(accepted.get(cell))]
        for metric, name in _SPEED_NAMES.items():
            parts.append(_speed_values(name, speeds.get((PRIMARY if metric == "speedup" else metric, *cell))))
        rows.append(_row(f"{label(own.arm, own.length)}, batch {own.batch}", parts))
    return [*rows, *_left_out(status, label)]


_Found = Mapping[str, tuple[Any, str | None]]
"""Name -> value, and why there is none."""


def _row(label: str, parts: Sequence[_Found]) -> Row:
    found = {name: item for part in parts for name, item in part.items()}
    values = {name: value for name, (value, _) in found.items()}
    return Row(label, values, {name: why for name, (value, why) in found.items() if value is None and why is not None})


def _left_out(status: Sequence[ArmStatus], label: Callable[[str, int | None], str]) -> Iterator[Row]:
    for item in status:
        if item.ran:
            continue
        known = {"arm": item.arm, "ran": False, "length": item.length}
        why = f"the arm did not run ({item.reason})"
        yield _row(label(item.arm, item.length), [{name: (known.get(name), why) for name in result_names()}])


def _own_values(own: Equality, has_failed: bool) -> _Found:
    return {
        "arm": (own.arm, None),
        "batch": (own.batch, None),
        "length": (own.length, None),
        "ran": (True, None),
        "drafter_error": (has_failed, None),
        "lossless": (own.lossless, own.reason),
        "equality": (own.verdict, None),
        "identical": (own.verdict == "identical", None),
        "diverged": (len(own.divergences), None),
        "diverged.real": (own.num_real, None),
        "diverged.control": (own.control_diverged, "nothing diverged that needed a control"),
        "diverged.p": (own.p_all_above_control, "nothing diverged that needed a control"),
    }


def _speed_values(name: str, speed: Speed | None) -> _Found:
    if speed is None:
        return dict.fromkeys((f"{name}{part}" for part in _SPEED_PARTS), (None, "it is what others are compared with"))
    ratio = speed.ratio
    found = {
        "": ratio.value,
        ".low": ratio.low,
        ".high": ratio.high,
        ".verdict": speed.verdict,
        ".p": speed.adjusted_p,
        ".detectable": speed.detectable,
    }
    none = f"no request has {METRICS[speed.metric]}"
    few = none if ratio.groups == 0 else f"{ratio.groups} groups, {MIN_GROUPS} needed"
    if ratio.groups >= MIN_GROUPS:
        few = f"{ratio.groups} groups decide nothing among so many ratios"
    return {f"{name}{part}": (_finite(found[part]), few if part in _NEEDS_INTERVAL else none) for part in _SPEED_PARTS}


def _acceptance_values(acceptance: Acceptance | None) -> _Found:
    estimates: Mapping[str, Estimate | None] = dict.fromkeys(_ACCEPTANCE_NAMES)
    if acceptance is not None:
        own = (acceptance.rate, acceptance.rate_of_requests, acceptance.accepted_length)
        estimates = dict(zip(_ACCEPTANCE_NAMES, own, strict=True))
    nothing = "the arm does not draft" if acceptance is None else "nothing was drafted"
    found: dict[str, tuple[Any, str | None]] = {}
    for name, estimate in estimates.items():
        value, low, high, few = None, None, None, nothing
        if estimate is not None:
            value, low, high = estimate.value, estimate.low, estimate.high
            few = f"{estimate.groups} prompts, {MIN_GROUPS} needed"
        found |= {name: (_finite(value), nothing), f"{name}.low": (low, few), f"{name}.high": (high, few)}
    found["acceptance.wasted"] = (acceptance.wasted if acceptance is not None else None, nothing)
    return found


def _finite(value: Any) -> Any:
    """Not-a-number is what was not measured."""
    return None if isinstance(value, float) and math.isnan(value) else value
