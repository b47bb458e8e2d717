"""The options of `dovetail simulate-routing`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from dovetail.commands import create_console, print_warning
from dovetail.commands.arrivals import BLOCK_TOKENS, read_trace
from dovetail.commands.checks import check_writable, require, require_at_least, write_text
from dovetail.commands.progress import Progress
from dovetail.contracts.command import Command
from dovetail.contracts.router import RouterSetup
from dovetail.plugins.commands.simulate_routing.report import result_page, result_table, summarize
from dovetail.plugins.commands.simulate_routing.routers import Create, find_routers
from dovetail.plugins.commands.simulate_routing.workload import SimulatedRequest, simulated_requests

if TYPE_CHECKING:
    from dovetail.plugins.commands.simulate_routing.replica import CostModel
    from dovetail.plugins.commands.simulate_routing.simulation import Outcome

app = typer.Typer(help="Compare routers over simulated replicas.", rich_markup_mode=None)
_BUNDLED = ("round_robin", "least_tokens", "prefix_aware")
_NO_BLOCKS = "the trace does not say which prompts are alike (hash_ids), so no prompt finds anything in a prefix cache"


class SimulateRoutingCommand(Command):
    """Replay a trace of requests over simulated replicas, and compare routers."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


@app.command("simulate-routing")
def simulate_routing(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Requests: Mooncake's JSONL, Azure's CSV, or columns like theirs.")
    ],
    router: Annotated[
        list[str] | None,
        typer.Option(
            "--router", metavar="NAME", help='A router, or {"name": ..., option: ...}. Repeat for more; all bundled.'
        ),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", help="Simulated replicas.")] = 16,
    speed: Annotated[float, typer.Option("--speed", help="2: requests arrive twice as fast.")] = 1.0,
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many requests.")] = None,
    prefill_rate: Annotated[
        float, typer.Option("--prefill-rate", help="Prompt tokens that a replica computes per second.")
    ] = 10_000.0,
    decode_step_ms: Annotated[
        float, typer.Option("--decode-step-ms", help="Time of a step with one token of each running request.")
    ] = 20.0,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", help="Most prompt tokens of a step.")] = 2048,
    kv_blocks: Annotated[
        int, typer.Option("--kv-blocks", help=f"KV blocks of a replica, of {BLOCK_TOKENS} tokens each.")
    ] = 1000,
    max_running: Annotated[int, typer.Option("--max-running", help="Most requests in a replica's batch.")] = 64,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="What routers see as every request's max_tokens.")
    ] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")] = None,
) -> None:
    """Replay a trace of requests over simulated replicas, and compare routers.

    The routers' code is that which a server runs; the replicas are a model of their cost. All routers get the same
    arrivals.
    """
    from dovetail.plugins.commands.simulate_routing.replica import CostModel

    least_one = {"--replicas": replicas, "--kv-blocks": kv_blocks, "--chunk-tokens": chunk_tokens}
    least_one |= {"--max-running": max_running, "--max-tokens": max_tokens}
    least_one |= {} if limit is None else {"--limit": limit}
    _check_numbers(least_one, {"--speed": speed, "--prefill-rate": prefill_rate, "--decode-step-ms": decode_step_ms})
    check_writable("--html", html)
    routers = find_routers(router or _BUNDLED)
    requests = simulated_requests(read_trace(trace, limit=limit, speed=speed, option="TRACE"))
    costs = CostModel(
        prefill_rate=prefill_rate,
        decode_step=decode_step_ms / 1e3,
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        num_blocks=kv_blocks,
        block_size=BLOCK_TOKENS,
    )
    _check_fit(requests, kv_blocks)
    warnings = [] if any(request.block_hashes for request in requests) else [_NO_BLOCKS]
    outcomes = _simulate(routers, requests, replicas, costs, max_tokens)
    facts = {"trace": trace.name, "requests": len(requests), "speed": speed, "replicas": replicas, **asdict(costs)}
    _print(outcomes, facts, warnings, as_json=as_json)
    if html is not None:
        write_text("--html", html, result_page(facts, warnings, outcomes))


def _check_numbers(least_one: dict[str, int], positive: dict[str, float]) -> None:
    for option, count in least_one.items():
        require_at_least(option, count, 1)
    for option, value in positive.items():
        require(value > 0 and math.isfinite(value), f"{option} {value}: give a number more than 0")


def _check_fit(requests: Sequence[SimulatedRequest], kv_blocks: int) -> None:
    largest = max(requests, key=lambda request: request.num_blocks(BLOCK_TOKENS))
    needed = largest.num_blocks(BLOCK_TOKENS)
    require(
        needed <= kv_blocks,
        f"--kv-blocks {kv_blocks}: request {largest.request_id} of the trace has {largest.input_tokens} input and "
        f"{largest.output_tokens} output tokens and fits no replica: give {needed} or more",
    )


def _simulate(
    routers: dict[str, Create],
    requests: Sequence[SimulatedRequest],
    num_replicas: int,
    costs: CostModel,
    max_tokens: int,
) -> dict[str, Outcome]:
    from dovetail.plugins.commands.simulate_routing.simulation import Simulation

    outcomes = {}
    with Progress(len(routers) * len(requests)) as progress:
        for label, create in routers.items():
            setup = RouterSetup(num_replicas=num_replicas, block_size=BLOCK_TOKENS)
            simulation = Simulation(create(setup), num_replicas, costs, max_tokens, label)
            outcomes[label] = simulation.run(requests, _show_on(progress, label))
    return outcomes


def _show_on(progress: Progress, label: str) -> Callable[[Outcome], None]:
    """Advances the bar, with the hit rate so far."""
    progress.show(label)

    def show(so_far: Outcome) -> None:
        if so_far.input_tokens:
            progress.show(f"{label}, hit rate {so_far.cached_tokens / so_far.input_tokens:.1%}")
        progress.advance()

    return show


def _print(outcomes: dict[str, Outcome], facts: dict[str, Any], warnings: Sequence[str], *, as_json: bool) -> None:
    summaries = [summarize(label, outcome) for label, outcome in outcomes.items()]
    if as_json:
        data = {"simulated": facts, "warnings": warnings, "routers": [asdict(summary) for summary in summaries]}
        typer.echo(json.dumps(data, indent=2))
        return
    for warning in warnings:
        print_warning(warning)
    create_console().print(result_table(summaries))
