"""The table that `dovetail top` shows, and the same as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dovetail.plugins.commands.top.figures import Figures, Load, Quantiles
from dovetail.plugins.commands.top.ranks import RankRow

_LATENCY_ROWS = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "e2e": "request latency",
    "queue": "time in queue",
}


def table_of(url: str, load: Load, recent: Figures, total: Figures, trouble: str | None = None) -> Table:
    """`recent`: since the reading before. `total`: since the server's start. `trouble`: why the numbers are old."""
    table = Table(title=url, title_justify="left", caption=trouble, caption_style="bold red", caption_justify="left")
    table.add_column("")
    table.add_column(f"last {recent.seconds or 0:.1f} s", justify="right")
    table.add_column("since start", justify="right")
    usage = "" if load.kv_usage is None else f"{load.kv_usage:.1%}"
    for name, value in (("running", load.running), ("waiting", load.waiting), ("KV cache in use", usage)):
        table.add_row(name, str(value), "")
    for engine, has in load.engines.items():
        if has.trouble:
            table.add_row(Text(f"replica {engine}"), Text(f"down ({has.trouble})", style="bold red"), "")
            continue
        used = "" if has.kv_usage is None else f", {has.kv_usage:.1%} of KV cache"
        table.add_row(Text(f"replica {engine}"), f"{has.running} running, {has.waiting} waiting{used}", "")
    for sink in load.sinks_off:
        table.add_row(Text(f"telemetry sink {sink}"), Text("off: it raised", style="bold red"), "")
    table.add_section()
    for name, was, is_ in _rows(recent, total):
        table.add_row(Text(name), was, is_)
    return table


def rank_table(ranks: Sequence[RankRow], *, of_replicas: bool) -> Table:
    """A row for each worker; columns of which nothing is known are left out. `of_replicas`: the server has several
    engines, though workers of one may be all that are known."""
    columns = {
        "replica": [row.engine if of_replicas else "" for row in ranks],
        "rank": [str(row.rank) for row in ranks],
        "stage": [str(row.stage) for row in ranks],
        "tensor rank": [str(row.tensor_rank) for row in ranks],
        "node": [row.node for row in ranks],
        "pid": ["" if row.pid is None else str(row.pid) for row in ranks],
        "device": [row.device for row in ranks],
        "state": [row.state for row in ranks],
        "memory": [_size(row.memory_bytes) for row in ranks],
        "GPU memory": [_size(row.device_bytes) for row in ranks],
        "KV cache": [_size(row.kv_bytes) for row in ranks],
        "steps": ["" if row.num_steps is None else f"{row.num_steps:,.0f}" for row in ranks],
        "last step": ["" if row.last_step_s is None else _seconds(row.last_step_s) for row in ranks],
        "in steps": [_percent(row.busy) for row in ranks],
    }
    table = Table(title="workers", title_justify="left")
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        table.add_column(name)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def data_of(url: str, load: Load, recent: Figures, total: Figures) -> dict[str, Any]:
    """For JSON; times in seconds, rates per second."""
    return {
        "url": url,
        "now": dataclasses.asdict(load),
        "interval": dataclasses.asdict(recent)
        | {
            "prompt_tokens_per_s": recent.per_second(recent.prompt_tokens),
            "generation_tokens_per_s": recent.per_second(recent.generation_tokens),
        },
        "since_start": dataclasses.asdict(total),
    }


def _rows(recent: Figures, total: Figures) -> Iterator[tuple[str, str, str]]:
    for name, was, is_ in (
        ("prompt tokens/s", recent.prompt_tokens, total.prompt_tokens),
        ("output tokens/s", recent.generation_tokens, total.generation_tokens),
    ):
        yield name, f"{recent.per_second(was) or 0:,.1f}", f"{is_:,.0f} tokens"
    yield "prefix cache hits", _percent(recent.prefix_hit_rate), _percent(total.prefix_hit_rate)
    yield "preemptions", f"{recent.preemptions:,.0f}", f"{total.preemptions:,.0f}"
    for reason in total.ended:
        yield f"ended: {reason}", f"{recent.ended.get(reason, 0):,.0f}", f"{total.ended[reason]:,.0f}"
    for key, name in _LATENCY_ROWS.items():
        if key in total.latencies:
            yield f"{name} p50 / p99", _latency(recent.latencies.get(key)), _latency(total.latencies[key])
    for drafter, acceptance in total.acceptance.items():
        lately = recent.acceptance.get(drafter)
        name = f"acceptance of {drafter}" if drafter else "acceptance"
        yield name, _percent(lately.rate if lately else None), _percent(acceptance.rate)
        if acceptance.length is not None:
            now = f"{lately.length:.2f}" if lately and lately.length is not None else ""
            yield f"{name}, tokens per round", now, f"{acceptance.length:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _latency(quantiles: Quantiles | None) -> str:
    return "" if quantiles is None else f"{_seconds(quantiles.p50)} / {_seconds(quantiles.p99)}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"
