"""`bench compare`: two results side by side, with the intervals of their ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.commands.checks import nearest, require
from dovetail.commands.machine import noise_warning
from dovetail.commands.saved import differences
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.comparison import Comparison, Row, Verdict
from dovetail.plugins.commands.bench.result import Metric, Result, failure_lines
from dovetail.plugins.commands.bench.stats import MANY_GROUPS, MIN_GROUPS, Ratio, ratio_of, statistic_of

_NOTES = (
    "Intervals: Student's t on logarithms, a value for each repetition (serve: block of consecutive requests); from"
    f" {MANY_GROUPS} repetitions on each side on, 4,000 bootstrap draws of them; none where a side has fewer than"
    f" {MIN_GROUPS}. undecided: the interval holds 1, or there is none.",
    "They know the spread within each result only: what changed on the machine from one to the other is not in them."
    " Each is computed alone, so of twenty metrics that are really equal one looks decided by chance.",
)


def compare(
    a: Result,
    b: Result,
    names: tuple[str, str] = ("a", "b"),
    *,
    allow: bool = False,
    metrics: Sequence[str] = (),
    statistic: str | None = None,
) -> Comparison:
    """Compares b with a.

    `metrics`: only these, whole names or the part behind the slash. `statistic`: in place of each metric's own.
    Raises `ConfigError` where the workloads differ and `allow` does not say that this is meant.
    """
    differing = list(differences(a.workloads, b.workloads)) if a.kind == b.kind else [f"{a.kind} / {b.kind}"]
    differing += differences(_neighbours(a), _neighbours(b))
    if differing and not allow:
        raise ConfigError(
            f"{names[0]} and {names[1]} are results of different workloads: {'; '.join(differing)}. Measure the same,"
            " or compare what they have in common with --allow"
        )
    common = _chosen([name for name in a.metrics if name in b.metrics], metrics)
    require(bool(common), f"{names[0]} and {names[1]} have no metric in common: compare results of one subcommand")
    rows = [compare_metric(name, a.metrics[name], b.metrics[name], statistic, ratio_of) for name in common]
    environment = list(differences(a.environment, b.environment, skip=frozenset({"load_average"})))
    config = list(differences(_with_plugins(a.config), _with_plugins(b.config)))
    notes = [f"differs: {line}" for line in environment + config] + list(_NOTES)
    warnings = [f"different workloads: {line}" for line in differing]
    if a == b:
        warnings.append(f"{names[0]} and {names[1]} are the same run: nothing is compared")
    for name, result in zip(names, (a, b), strict=True):
        if warning := noise_warning(result.spans):
            warnings.append(f"{name}: {warning}")
        warnings += [f"{name}: {line}" for line in failure_lines(result)]
    return Comparison(*names, rows, notes, warnings)


def _neighbours(result: Result) -> dict[str, Any]:
    """The processes that computed during the measurement. Results that do not say had none."""
    return {key: result.procedure.get(key, 0) for key in ("neighbours", "neighbour_threads")}


def _chosen(common: list[str], wanted: Sequence[str]) -> list[str]:
    for want in wanted:
        known = {*common, *(name.rpartition("/")[2] for name in common)}
        require(want in known, f"--metric {want}: the results have no such metric in common; {nearest(want, known)}")
    return [name for name in common if not wanted or name in wanted or name.rpartition("/")[2] in wanted]


def compare_metric(
    name: str, a: Metric, b: Metric, statistic: str | None, ratio_of: Callable[..., Ratio | None]
) -> Row:
    """The row of one metric. `statistic`: None for the metric's own; `ratio_of`: of the groups of a and b."""
    require(
        (a.unit, a.better) == (b.unit, b.better),
        f"{name} is in {a.unit} in one result and {b.unit} in the other: measure both with one version",
    )
    statistic = statistic or a.statistic
    a_value, b_value = statistic_of(a.samples, statistic), statistic_of(b.samples, statistic)
    ratio = ratio_of(a.groups, b.groups, statistic)
    if ratio is None:
        return Row(name, a.unit, statistic, a_value, b_value, None, None, "undecided", None)
    slowdown = ratio.value - 1 if a.better == "lower" else (1 / ratio.value - 1 if ratio.value > 0 else None)
    verdict = _verdict(ratio.interval, a.better)
    return Row(name, a.unit, statistic, a_value, b_value, ratio.value, ratio.interval, verdict, slowdown)


def _verdict(interval: tuple[float, float] | None, better: str) -> Verdict:
    if interval is None or interval[0] <= 1 <= interval[1]:
        return "undecided"
    is_more = interval[0] > 1
    return "faster" if is_more == (better == "higher") else "slower"


def _with_plugins(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with its plugins by kind, so that a difference is reported by kind and name."""
    kinds: dict[str, list[str]] = {}
    for plugin in config.get("plugins", ()):
        origin = " ".join(str(plugin[key]) for key in ("distribution", "version") if plugin.get(key))
        kinds.setdefault(plugin["kind"], []).append(plugin["name"] + (f" ({origin})" if origin else ""))
    return {**config, "plugins": {kind: ", ".join(names) for kind, names in kinds.items()}}
