"""What a server's front end costs: requests over real sockets to an engine that computes nothing.

    python benchmarks/serving/front_end.py [MEASUREMENT ...] [--peer vllm --python PEERS_HOME/vllm/bin/python]

An engine's process gives each stream one token per step; one API process makes text and frames; this process reads
them from raw sockets. With `--peer`, the peer's server runs at the same time with the same model, and takes turns:
ours, the peer's, ours, ... (`benchmarks/peers_setup.sh PEERS_HOME vllm` installs it). Figures are medians of the
rounds; the ratio is the median of the rounds' ratios. vLLM's front end and its API server are one process, as ours.

throughput    64 streams at steps of 10, 2 and 0 ms (as fast as the engine can: readers lag, and frames are merged).
              CPU time is that of all threads of a process. Where servers merge different numbers of tokens,
              compare the time per frame: its inverse is what a core does at one token per frame.
first-token   time to the first token at 1 stream and at 64 at once, where steps take no time; and of one more request
              every 20 ms while 63 streams run at steps of 2 ms: such a request waits for the step that runs, then for
              its own, so up to 4 ms are the engine's
gaps          gaps between frames at 64 streams x 10 ms: alone, with prompts of 100,000 tokens, with /metrics read
saturation    /health and /metrics while 64 streams run at steps of 0 ms
whole         responses that are not streamed, 8 tokens each, over 32 connections
idle          share of a core that each process takes while there are no requests
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.serving.servers import Server, Start, dovetail, vllm
from benchmarks.serving.traffic import (
    Reading,
    ask_first_token,
    ask_health,
    ask_long,
    ask_metrics,
    asking,
    count_responses,
    read_streams,
)

Servers = Mapping[str, Server]


@contextmanager
def all_of(starts: Mapping[str, Start], step_ms: float, streams: int) -> Iterator[Servers]:
    """All servers at once: those that wait for requests disturb no one."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(start(step_ms, streams)) for name, start in starts.items()}
        for server in servers.values():
            read_streams(server.port, streams, 20)
        yield servers


def interleaved(
    servers: Servers, rounds: int, measure: Callable[[Server], Sequence[float]]
) -> dict[str, list[Sequence[float]]]:
    """By server, what each round measured."""
    found: dict[str, list[Sequence[float]]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            found[name].append(measure(server))
    return found


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def print_row(*cells: str) -> None:
    """One line of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_head(*cells: str) -> None:
    """The head of a table."""
    print()
    print_row(*cells)
    print_row(*["---"] * len(cells))


def print_ratio(found: Mapping[str, list[Sequence[float]]], label: str, formats: Sequence[str]) -> None:
    """How ours compares with each peer's, column by column, where there is a peer."""
    ours, *peers = found
    for peer in peers:
        ratios = [
            [mine / theirs if theirs else float("nan") for mine, theirs in zip(*pair, strict=True)]
            for pair in zip(found[ours], found[peer], strict=True)
        ]
        cells = [spec.format(value) if spec else "" for spec, value in zip(formats, medians(ratios), strict=True)]
        print_row(label, f"{ours} / {peer}", *cells)


def cpu_seconds(process: psutil.Process) -> float:
    """Of all threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def throughput(starts: Mapping[str, Start], streams: int, num_tokens: int, steps: Sequence[float], rounds: int) -> None:
    """The table of tokens per second."""

    def measure(server: Server) -> tuple[float, ...]:
        before = cpu_seconds(server.api), cpu_seconds(server.engine)
        seconds, readings = read_streams(server.port, streams, num_tokens)
        total = streams * num_tokens
        costs = (cpu_seconds(server.api) - before[0], cpu_seconds(server.engine) - before[1])
        frames = sum(reading.num_frames for reading in readings) / total
        api_us, engine_us = (1e6 * cost / total for cost in costs)
        return total / seconds, frames, api_us, api_us / frames, engine_us, mebibytes(server.api)

    head = ("tokens/s", "frames per token", "API, us of CPU per token", "per frame", "engine, us per token", "API, MiB")
    print_head("step", "server", *head)
    for step_ms in steps:
        with all_of(starts, step_ms, streams) as servers:
            found = interleaved(servers, rounds, measure)
        for name, rows in found.items():
            rate, frames_, *us, memory = medians(rows)
            cells = f"{rate:,.0f}", f"{frames_:.2f}", *(f"{value:.1f}" for value in us), f"{memory:.0f}"
            print_row(f"{step_ms:g} ms", name, *cells)
        print_ratio(found, f"{step_ms:g} ms", ["{:.2f}x", "", "{:.2f}x", "{:.2f}x", "{:.2f}x", "{:.2f}x"])


def mebibytes(process: psutil.Process) -> float:
    """Resident memory."""
    return float(process.memory_info().rss / 2**20)


def first_token(starts: Mapping[str, Start], streams: int, rounds: int) -> None:
    """The table of times to the first token."""
    print_head("streams", "server", "first token p50, ms", "p99, ms")
    for num, repeats in ((1, 100), (streams, 10)):

        def measure(server: Server, num: int = num, repeats: int = repeats) -> tuple[float, float]:
            found = []
            for _ in range(repeats):
                _, readings = read_streams(server.port, num, 2, keep_arrivals=True)
                found += [reading.first_ms for reading in readings]
            return percentile(found, 0.5), percentile(found, 0.99)

        with all_of(starts, 0, streams) as servers:
            found = interleaved(servers, rounds, measure)
        print_first_tokens("1" if num == 1 else f"{num} at once", found)

    def measure_one_more(server: Server) -> tuple[float, float]:
        with asking(ask_first_token, server.port, 0.02) as times:
            read_streams(server.port, streams - 1, 1000)
        return 1e3 * percentile(times, 0.5), 1e3 * percentile(times, 0.99)

    with all_of(starts, 2, streams) as servers:
        print_first_tokens(f"1 more beside {streams - 1}", interleaved(servers, rounds, measure_one_more))


def print_first_tokens(label: str, found: Mapping[str, list[Sequence[float]]]) -> None:
    """The rows of one load, and their ratio."""
    for name, rows in found.items():
        print_row(label, name, *(f"{value:.2f}" for value in medians(rows)))
    print_ratio(found, label, ["{:.2f}x", "{:.2f}x"])


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of all values is."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def gaps(starts: Mapping[str, Start], streams: int, num_tokens: int, rounds: int) -> None:
    """The table of gaps between frames."""
    label = f"{streams} streams x 10 ms"
    print_head(label, "server", "gap p50, ms", "p99", "longest", "least / mean rate", "disturbances", "p99, ms")
    disturbances = {"alone": None, "100,000-token prompts": ask_long, "/metrics read": ask_metrics}
    with all_of(starts, 10, streams + 1) as servers:
        for label, ask in disturbances.items():

            def measure(server: Server, ask: Callable[[int], None] | None = ask) -> tuple[float, ...]:
                if ask is None:
                    return *_gaps_of(server, streams, num_tokens), 0, 0
                with asking(ask, server.port, 0.0) as times:
                    found = _gaps_of(server, streams, num_tokens)
                return *found, len(times), 1e3 * percentile(times, 0.99)

            for name, rows in interleaved(servers, rounds, measure).items():
                p50, p99, longest, fairness, count, other_p99 = medians(rows)
                cells = f"{p50:.1f}", f"{p99:.1f}", f"{longest:.1f}", f"{fairness:.3f}", f"{count:.0f}"
                print_row(label, name, *cells, f"{other_p99:.1f}")


def _gaps_of(server: Server, streams: int, num_tokens: int) -> tuple[float, float, float, float]:
    _, readings = read_streams(server.port, streams, num_tokens, keep_arrivals=True)
    found = [
        1e3 * (later - earlier)
        for arrivals in map(_arrivals, readings)
        for earlier, later in itertools.pairwise(arrivals)
    ]
    rates = [num_tokens / (arrivals[-1] - arrivals[0]) for arrivals in map(_arrivals, readings)]
    return percentile(found, 0.5), percentile(found, 0.99), max(found), min(rates) / statistics.mean(rates)


def _arrivals(reading: Reading) -> list[float]:
    assert reading.arrivals is not None
    return reading.arrivals


def saturation(starts: Mapping[str, Start], streams: int, num_tokens: int, rounds: int) -> None:
    """The table of probes while streams run as fast as they can."""
    print_head("probe, every 20 ms", "server", "p50, ms", "p99, ms", "longest")
    with all_of(starts, 0, streams) as servers:
        for label, ask in (("/health", ask_health), ("/metrics", ask_metrics)):

            def measure(server: Server, ask: Callable[[int], None] = ask) -> tuple[float, ...]:
                with asking(ask, server.port, 0.02) as times:
                    read_streams(server.port, streams, 5 * num_tokens)  # so that there are a hundred probes
                return 1e3 * percentile(times, 0.5), 1e3 * percentile(times, 0.99), 1e3 * max(times)

            for name, rows in interleaved(servers, rounds, measure).items():
                print_row(label, name, *(f"{value:.1f}" for value in medians(rows)))


def whole(starts: Mapping[str, Start], rounds: int) -> None:
    """The table of responses per second."""
    seconds = 5.0
    print_head("whole responses", "server", "per second", "API, us of CPU each")

    def measure(server: Server) -> tuple[float, float]:
        before = cpu_seconds(server.api)
        count = count_responses(server.port, 32, 8, seconds)
        return count / seconds, 1e6 * (cpu_seconds(server.api) - before) / count

    with all_of(starts, 0, 32) as servers:
        found = interleaved(servers, rounds, measure)
    for name, rows in found.items():
        print_row("32 connections", name, *(f"{value:,.0f}" for value in medians(rows)))
    print_ratio(found, "32 connections", ["{:.2f}x", "{:.2f}x"])


def idle(starts: Mapping[str, Start], streams: int) -> None:
    """The table of what processes take while there is nothing to do."""
    print_head("idle for 10 s", "server", "API, % of a core", "engine", "supervisor", "API, MiB")
    with all_of(starts, 10, streams) as servers:
        time.sleep(2)
        processes = {name: (server.api, server.engine, server.supervisor) for name, server in servers.items()}
        before = {name: [cpu_seconds(p) if p else 0.0 for p in found] for name, found in processes.items()}
        time.sleep(10)
        for name, found in processes.items():
            shares = [
                f"{100 * (cpu_seconds(p) - earlier) / 10:.2f}" if p else "-"
                for p, earlier in zip(found, before[name], strict=True)
            ]
            print_row("", name, *shares, f"{mebibytes(servers[name].api):.0f}")


def main() -> None:
    """Prints the tables."""
    names = ("throughput", "first-token", "gaps", "saturation", "whole", "idle")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="*", metavar="MEASUREMENT", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--peer", choices=["vllm"])
    parser.add_argument("--python", type=Path, help="the peer's")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--steps", type=float, nargs="*", default=[10, 2, 0], help="milliseconds, of throughput")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    unknown = set(given.measurements) - set(names)
    if unknown or (given.peer is None) != (given.python is None):
        parser.error(f"no such measurement: {', '.join(unknown)}" if unknown else "--peer and --python go together")
    starts: dict[str, Start] = {"dovetail": dovetail}
    if given.peer is not None:
        starts[given.peer] = vllm(given.python)
    tables: dict[str, Callable[[], None]] = {
        "throughput": lambda: throughput(starts, given.streams, given.tokens, given.steps, given.rounds),
        "first-token": lambda: first_token(starts, given.streams, given.rounds),
        "gaps": lambda: gaps(starts, given.streams, given.tokens, given.rounds),
        "saturation": lambda: saturation(starts, given.streams, given.tokens, given.rounds),
        "whole": lambda: whole(starts, given.rounds),
        "idle": lambda: idle(starts, given.streams),
    }
    for name in names:
        if not given.measurements or name in given.measurements:
            tables[name]()
    if given.peer is not None:
        print("\nvLLM: tokenizing, text and frames are in the process of its API server, as here. Python front end.")


if __name__ == "__main__":
    main()
