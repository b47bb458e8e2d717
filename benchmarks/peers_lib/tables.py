"""Markdown tables of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .workload import FOREIGN, LOWER_IS_BETTER, METRICS

Samples = Mapping[str, Sequence[float]]
"""Values of each metric of one engine."""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def speed_tables(record: Mapping[str, Any]) -> str:
    """Medians (minimum-maximum) of all engines, and how ours stand to the best peer."""
    runs = record["runs"]
    names = list(dict.fromkeys(run["name"] for run in runs))
    samples = {name: _samples(runs, name) for name in names}
    versions = {run["name"]: run["version"] for run in runs if "version" in run}
    rows = []
    for name in names:
        errors = [run["error"] for run in runs if run["name"] == name and "error" in run]
        if not samples[name]:
            rows.append([name, f"failed: {errors[-1][:300]}", *[""] * len(METRICS)])
            continue
        cells = [_spread(samples[name][metric]) for metric in (*METRICS, FOREIGN)]
        rows.append([f"{name} ({versions[name]})" + (" (then failed)" if errors else ""), *cells])
    parts = [_head(record), markdown(["engine", *METRICS, FOREIGN], rows)]
    ours = {name: samples[name] for name in names if samples[name] and _is_ours(runs, name)}
    theirs = {name: samples[name] for name in names if samples[name] and name not in ours}
    if ours and theirs:
        parts.append("Ours over the best peer of each column, medians; above 1 where ours is better:")
        parts.append(_ratios(ours, theirs))
    if record["absent"]:
        parts.append("Not installed: " + "; ".join(f"{name} ({why})" for name, why in record["absent"].items()) + ".")
    return "\n\n".join(parts)


def _head(record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    return (
        f"{record['date']}, {machine['processor']}, {machine['cpus']} CPUs ({machine['instructions']}),"
        f" {machine['system']}, Python {machine['python']}; {record['threads']} threads, prompts {record['prompts']}."
    )


def _is_ours(runs: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(run["name"] == name and run["ours"] for run in runs)


def _samples(runs: Sequence[Mapping[str, Any]], name: str) -> Samples:
    """Empty where no run of the engine succeeded."""
    figures = [run["figures"] for run in runs if run["name"] == name and "figures" in run]
    if not figures:
        return {}
    return {metric: [f[metric] for f in figures if f[metric] is not None] for metric in (*METRICS, FOREIGN)}


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})"


def _ratios(ours: Mapping[str, Samples], theirs: Mapping[str, Samples]) -> str:
    rows = []
    best = {metric: _best(theirs, metric) for metric in METRICS}
    for name, samples in ours.items():
        cells = []
        for metric in METRICS:
            mine, other = statistics.median(samples[metric]), best[metric][1]
            cells.append(f"{other / mine if metric in LOWER_IS_BETTER else mine / other:.2f}x")
        rows.append([name, *cells])
    rows.append(["best peer", *(f"{best[metric][0]}: {best[metric][1]:.4g}" for metric in METRICS)])
    return markdown(["", *METRICS], rows)


def _best(theirs: Mapping[str, Samples], metric: str) -> tuple[str, float]:
    medians = {name: statistics.median(samples[metric]) for name, samples in theirs.items()}
    pick = min if metric in LOWER_IS_BETTER else max
    name = pick(medians, key=lambda key: medians[key])
    return name, medians[name]
