"""Results of a simulation: a table, JSON, and a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.table import Table

from dovetail.commands import page, svg
from dovetail.plugins.commands.simulate_routing.simulation import Outcome

_SHORTEST_S = 1e-3
"""What is shorter is drawn as this."""
_NOTE = (
    "Simulated: the routers' code is real, the replicas are a model of their cost. TTFT: from arrival to the first "
    "output token. Hit rate: share of the prompt tokens that a replica's prefix cache had. Imbalance: time in steps of "
    "the busiest replica / mean of all."
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One router's line."""

    router: str
    hit_rate: float
    ttft_mean: float
    """Seconds, as the next two."""
    ttft_p50: float
    ttft_p99: float
    imbalance: float
    """Time in steps of the busiest replica / mean of all."""
    busy: float
    """Mean share of the time in which a replica is in a step."""
    seconds: float
    """From the first arrival to the end of the last request."""


def summarize(router: str, outcome: Outcome) -> Summary:
    """The figures of an outcome; percentiles are those of the nearest rank."""
    ordered, busy = sorted(outcome.ttft), outcome.busy_seconds
    mean_busy = sum(busy) / len(busy)
    return Summary(
        router=router,
        hit_rate=outcome.cached_tokens / outcome.input_tokens,
        ttft_mean=sum(ordered) / len(ordered),
        ttft_p50=_nearest_rank(ordered, 50),
        ttft_p99=_nearest_rank(ordered, 99),
        imbalance=max(busy) / mean_busy,
        busy=mean_busy / outcome.seconds,
        seconds=outcome.seconds,
    )


def result_table(summaries: Sequence[Summary]) -> Table:
    """For a terminal."""
    table = Table(caption=_NOTE, caption_justify="left")
    for number, heading in enumerate(_HEADER):
        table.add_column(heading, justify="right" if number else "left")
    for summary in summaries:
        table.add_row(*_cells(summary))
    return table


def result_page(facts: Mapping[str, Any], warnings: Sequence[str], outcomes: Mapping[str, Outcome]) -> str:
    """One HTML file: the table, and by router the distributions of TTFT and of the replicas' load, and hit rates, where
    any prompt was found."""
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(summarize(name, outcome)))}</tr>"
        for name, outcome in outcomes.items()
    )
    hits = [(name, [summarize(name, outcome).hit_rate]) for name, outcome in outcomes.items()]
    plots = [
        _shares("TTFT on a logarithmic scale: share of requests up to it", _logarithms(outcomes), _power, "seconds"),
        _shares("Time in steps: share of replicas up to it", _loads(outcomes), _share, "share of the whole time"),
        *([svg.dot_rows("Hit rate", hits, _share)] if any(rate for _, (rate,) in hits) else []),
    ]
    return page.whole_page(
        "dovetail simulate-routing",
        [
            "<h1>dovetail simulate-routing</h1>",
            *(f'<p class="warning">{escape(warning)}</p>' for warning in warnings),
            page.table(_HEADER, rows),
            f'<p class="soft">{escape(_NOTE)}</p>',
            f'<div class="plots">{"".join(plots)}</div>',
            "<h2>What was simulated</h2>",
            page.facts({_FACTS.get(key, key): value for key, value in facts.items()}),
        ],
    )


_FACTS = {
    "speed": "times as fast as the trace",
    "prefill_rate": "prompt tokens per second",
    "decode_step": "seconds of a decode step",
    "chunk_tokens": "most prompt tokens of a step",
    "max_running": "most running requests",
    "num_blocks": "KV blocks of a replica",
    "block_size": "tokens of a block",
}
"""What the page calls them."""
_HEADER = ("router", "hit rate", "TTFT mean, s", "TTFT p50, s", "TTFT p99, s", "imbalance", "busy", "total, s")


def _cells(summary: Summary) -> list[str]:
    return [
        summary.router,
        f"{summary.hit_rate:.1%}",
        *(f"{value:.3f}" for value in (summary.ttft_mean, summary.ttft_p50, summary.ttft_p99)),
        f"{summary.imbalance:.2f}",
        f"{summary.busy:.1%}",
        f"{summary.seconds:.1f}",
    ]


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _shares(title: str, samples: Mapping[str, Sequence[float]], show: svg.Format, x_title: str) -> str:
    lines = [svg.Series(name, svg.cumulative(values)) for name, values in samples.items()]
    return svg.curves(title, lines, show, _share, x_title, stepped=True)


def _logarithms(outcomes: Mapping[str, Outcome]) -> Mapping[str, Sequence[float]]:
    """Of TTFTs: their medians differ by powers of ten where caches do."""
    return {name: [math.log10(max(_SHORTEST_S, one)) for one in result.ttft] for name, result in outcomes.items()}


def _loads(outcomes: Mapping[str, Outcome]) -> Mapping[str, Sequence[float]]:
    return {name: [one / result.seconds for one in result.busy_seconds] for name, result in outcomes.items()}


def _power(value: float) -> str:
    return f"{float(f'{10**value:.2g}'):g}"


def _share(value: float) -> str:
    return f"{value:.0%}"
