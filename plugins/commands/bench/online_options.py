"""The options of `bench online`, made into what to send and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.commands.checks import read_text, require, require_at_least
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.online import TraceChoice, Traffic, parse_traffic
from dovetail.plugins.commands.bench.selection import LoadChoice, SizeOptions, choose_load, sized_workload


@dataclass(frozen=True)
class OnlineOptions:
    """Options of `bench online`."""

    rate: str
    burstiness: float
    concurrency: int | None
    slo: Sequence[str]
    trace: Path | None
    trace_speed: float
    skip_too_long: bool
    workload: str | None
    dataset: Path | None
    text: Path | None
    sizes: SizeOptions
    seed: int

    def choose(self) -> tuple[LoadChoice | TraceChoice, Traffic]:
        """What to send, and how. Options that would be ignored are refused with `ConfigError`."""
        traffic = parse_traffic(self.rate, self.burstiness, self.concurrency, self.slo, self.seed)
        if self.trace is not None:
            return self._trace(self.trace), traffic
        require(not self.skip_too_long and self.trace_speed == 1, "--skip-too-long and --trace-speed need --trace FILE")
        require(self.workload != "all", "--workload all: a serving profile has one workload; name it")
        names = [] if self.workload is None else [self.workload]
        default = [sized_workload(32, 128, 128)]
        return choose_load(names, self.dataset, self.text, self.sizes, self.seed, default), traffic

    def _trace(self, trace: Path) -> TraceChoice:
        if self.rate != "inf" or self.burstiness != 1:
            raise ConfigError(
                "a trace says when requests come: leave out --rate and --burstiness (--trace-speed scales)"
            )
        lengths = [name for name in self.sizes.given() if name != "--num-requests"]
        others = {"--workload": self.workload, "--dataset": self.dataset}
        extra = lengths + [name for name, value in others.items() if value is not None]
        require(not extra, f"a trace says what its requests are: leave out {', '.join(extra)}")
        if self.sizes.num_requests is not None:
            require_at_least("--num-requests", self.sizes.num_requests, 1)
        if self.text is not None:
            read_text("--text", self.text)
        require_at_least("--seed", self.seed, 0)
        return TraceChoice(trace, self.trace_speed, self.sizes.num_requests, self.skip_too_long, self.text, self.seed)
