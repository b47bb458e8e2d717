"""The results of a load by name, one row per variant and rate: what `--fail-if` judges where it names `load.`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dovetail.spec_decode.experiments.load.results import LOAD_METRICS, LoadReport, LoadSpeed, LoadState
from dovetail.spec_decode.experiments.results import ArmStatus, Row
from dovetail.spec_decode.experiments.schema import CONTROL

PREFIX = "load."
_PARTS = ("", ".low", ".high", ".verdict", ".p", ".detectable")
_NEED_INTERVAL = (".low", ".high", ".p", ".detectable")
_NOT_MEASURED = "no segment was measured (--resume goes on)"
_OWN = ("load.point", "load.rate", "load.queue", "load.capacity", "load.goodput")
_GAIN = ("load.goodput.gain", "load.goodput.gain.low", "load.goodput.gain.high")


def load_names() -> list[str]:
    """Every name that a row has."""
    return ["arm", "length", "ran", *_OWN, *_GAIN, *(_name(metric, part) for metric in LOAD_METRICS for part in _PARTS)]


def _name(metric: str, part: str) -> str:
    return PREFIX + metric.replace("tokens/s", "throughput") + part


def load_rows(found: LoadReport, status: Sequence[ArmStatus], label: Callable[[str, int | None], str]) -> list[Row]:
    """Every variant at every point but the baseline and the control, measured or not, then the arms that did not
    run."""
    return [*_measured(found, label), *_missing(found, label), *_left_out(status, label)]


def _missing(found: LoadReport, label: Callable[[str, int | None], str]) -> Iterator[Row]:
    for one in found.missing:
        if one.arm == CONTROL or (one.arm, one.length) == found.baseline:
            continue
        known = {"arm": one.arm, "length": one.length, "ran": True, "load.point": one.point, "load.rate": one.rate}
        yield _without(known, f"{label(one.arm, one.length)}, {one.point}", _NOT_MEASURED)


def _left_out(status: Sequence[ArmStatus], label: Callable[[str, int | None], str]) -> Iterator[Row]:
    for one in status:
        if not one.ran:
            known = {"arm": one.arm, "length": one.length, "ran": False}
            yield _without(known, label(one.arm, one.length), f"the arm did not run ({one.reason})")


def _without(known: Mapping[str, Any], label: str, why: str) -> Row:
    """Of what was not measured."""
    values = {name: known.get(name) for name in load_names()}
    return Row(label, values, {name: why for name in values if name not in known})


def _measured(found: LoadReport, label: Callable[[str, int | None], str]) -> list[Row]:
    speeds = {(s.point, s.arm, s.length, s.metric): s for s in found.speed}
    rows = []
    for state in found.states:
        if state.arm == CONTROL or (state.arm, state.length) == found.baseline:
            continue
        values, unmeasured = _state_values(state)
        for metric in LOAD_METRICS:
            speed = speeds.get((state.point, state.arm, state.length, metric))
            values |= _speed_values(metric, speed)
            if speed is None:
                unmeasured |= {_name(metric, part): f"no request has {LOAD_METRICS[metric]}" for part in _PARTS}
        few = f"{state.growth.groups} segments: load.segments needs more"
        for name, value in values.items():
            if value is None and name.endswith(_NEED_INTERVAL):
                unmeasured.setdefault(name, few)
        rows.append(Row(f"{label(state.arm, state.length)}, {state.point}", values, unmeasured))
    return rows


def _state_values(state: LoadState) -> tuple[dict[str, Any], dict[str, str]]:
    gain = state.goodput_gain
    values: dict[str, Any] = {
        "arm": state.arm,
        "length": state.length,
        "ran": True,
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


def _speed_values(metric: str, speed: LoadSpeed | None) -> dict[str, Any]:
    if speed is None:
        return {_name(metric, part): None for part in _PARTS}
    ratio = speed.ratio
    values = (ratio.value, ratio.low, ratio.high, speed.verdict, speed.adjusted_p, speed.detectable)
    return {_name(metric, part): value for part, value in zip(_PARTS, values, strict=True)}
