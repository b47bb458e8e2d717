"""Service levels: the limits that a request must keep to count as served well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.commands.checks import nearest, require
from dovetail.plugins.commands.bench.stats import percentile
from dovetail.plugins.commands.bench.timing import RequestTimes

_MEANINGS = {
    "ttft": "TTFT",
    "itl": "the 95th percentile of its ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
}


@dataclass(frozen=True)
class ServiceLevels:
    """Limits in milliseconds, by name."""

    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, given: Sequence[str], option: str = "--slo", separator: str = "=") -> ServiceLevels:
        """From "ttft=500" and the like. Raises `ConfigError`."""
        limits: dict[str, float] = {}
        for item in given:
            name, _, text = item.partition(separator)
            example = f"{option} ttft{separator}500"
            require(name in _MEANINGS, f"{option} {item}: {nearest(name, _MEANINGS)} Write, for example, {example}")
            try:
                limit = float(text.removesuffix("ms"))
            except ValueError:
                limit = math.nan
            require(0 < limit < math.inf, f"{option} {item}: give milliseconds, more than 0, as in {example}")
            require(name not in limits, f"{option} {name} is given twice: keep one")
            limits[name] = limit
        return cls(limits)

    def are_met(self, request: RequestTimes) -> bool:
        """Whether a request keeps every limit; one of a single token has no gaps that could pass one."""
        values = {
            "ttft": request.ttft,
            "itl": percentile(request.gaps, 95) if request.gaps else 0.0,
            "tpot": request.tpot or 0.0,
            "e2e": request.e2e,
        }
        return all(values[name] * 1e3 <= limit for name, limit in self.limits_ms.items())

    def explain(self) -> str:
        """Returns the limits as text."""
        return ", ".join(f"{_MEANINGS[name]} up to {limit:g} ms" for name, limit in self.limits_ms.items())
