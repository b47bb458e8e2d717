"""The results of a load by name, one row per variant and rate: what `--fail-if` judges where it names `load.`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dovetail.spec_decode.experiments.load_results import LOAD_METRICS, LoadReport, LoadSpeed, LoadState
from dovetail.spec_decode.experiments.results import Row
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

PREFIX = "load."
_PARTS = ("", ".low", ".high", ".verdict", ".p", ".detectable")
_NEED_INTERVAL = frozenset({".low", ".high", ".p", ".detectable"})
_OWN = ("load.point", "load.rate", "load.queue", "load.capacity", "load.goodput")
_GAIN = ("load.goodput.gain", "load.goodput.gain.low", "load.goodput.gain.high")


def load_names() -> list[str]:
    """Every name that a row has."""
    return ["arm", "length", *_OWN, *_GAIN, *(_name(metric, part) for metric in LOAD_METRICS for part in _PARTS)]


def _name(metric: str, part: str) -> str:
    return PREFIX + metric.replace("tokens/s", "throughput") + part


def load_rows(found: LoadReport, label: Callable[[str, int | None], str]) -> list[Row]:
    """Every variant at every point but the baseline and its control."""
    speeds = {(s.point, s.arm, s.length, s.metric): s for s in found.speed}
    rows = []
    for state in found.states:
        if state.arm in (BASELINE, CONTROL):
            continue
        values, unmeasured = _state_values(state)
        for metric in LOAD_METRICS:
            values |= _speed_values(speeds[state.point, state.arm, state.length, metric])
        few = f"{state.growth.groups} segments: load.segments needs more"
        unmeasured |= {
            name: few for name, value in values.items() if value is None and name.endswith(tuple(_NEED_INTERVAL))
        }
        rows.append(Row(f"{label(state.arm, state.length)}, {state.point}", values, unmeasured))
    return rows


def _state_values(state: LoadState) -> tuple[dict[str, Any], dict[str, str]]:
    gain = state.goodput_gain
    values: dict[str, Any] = {
        "arm": state.arm,
        "length": state.length,
        "load.point": state.point,
        "load.rate": state.rate,
        "load.queue": state.queue,
        "load.capacity": state.capacity,
        "load.goodput": state.goodput,
        "load.goodput.gain": gain.value if gain is not None else None,
        "load.goodput.gain.low": gain.low if gain is not None else None,
        "load.goodput.gain.high": gain.high if gain is not None else None,
    }
    none = "load.slo is empty"
    names = ("load.goodput", *_GAIN)
    return values, {name: none for name in names if state.goodput is None}


def _speed_values(speed: LoadSpeed) -> dict[str, Any]:
    ratio = speed.ratio
    values = (ratio.value, ratio.low, ratio.high, speed.verdict, speed.adjusted_p, speed.detectable)
    return {
        _name(speed.metric, part): None if isinstance(value, float) and math.isnan(value) else value
        for part, value in zip(_PARTS, values, strict=True)
    }
