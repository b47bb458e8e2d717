"""The options of `bench serve` besides the data set, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dovetail.commands.arrivals import check_burstiness, parse_rate
from dovetail.commands.checks import require, require_at_least
from dovetail.commands.http import parse_base_url, without_password
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.serve.client import Form
from dovetail.plugins.commands.bench.slo import ServiceLevels

_ENDPOINTS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "/v1/completions": "/v1/completions",
    "/v1/chat/completions": "/v1/chat/completions",
}
_OWN_FIELDS = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options", "n")
_VLLM_NAMES = {"e2el": "e2e"}
_METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Traffic:
    """When requests come."""

    rate: float
    """Requests per second; infinite: all at once."""
    burstiness: float
    burst_size: int
    max_concurrency: int | None
    seed: int

    def describe(self) -> dict[str, Any]:
        """Plain data, for the workload of a result."""
        return {
            "rate": "inf" if math.isinf(self.rate) else self.rate,
            "burstiness": "inf" if math.isinf(self.burstiness) else self.burstiness,
            "burst_size": self.burst_size,
            "max_concurrency": self.max_concurrency,
        }


@dataclass(frozen=True)
class Shown:
    """What the table shows."""

    metrics: Sequence[str]
    """With percentiles; the other latencies are left out."""
    percentiles: Sequence[float]


def parse_traffic(
    rate: str, burstiness: float, burst_size: int, max_concurrency: int | None, seed: int, *, is_trace: bool
) -> Traffic:
    """Raises `ConfigError` for what cannot be."""
    check_burstiness(burstiness)
    require_at_least("--burst-size", burst_size, 1)
    if max_concurrency is not None:
        require_at_least("--max-concurrency", max_concurrency, 1)
    found = Traffic(parse_rate(rate, "--request-rate"), burstiness, burst_size, max_concurrency, seed)
    is_given = not math.isinf(found.rate) or burstiness != 1 or burst_size != 1
    require(
        not (is_trace and is_given),
        "a trace says when requests come: leave out --request-rate, --burstiness and --burst-size (--trace-speed"
        " scales)",
    )
    require(
        not math.isinf(found.rate) or (burstiness == 1 and burst_size == 1),
        "--burstiness and --burst-size shape the arrivals of a finite --request-rate: give one",
    )
    return found


def parse_form(
    endpoint: str, ignore_eos: bool, temperature: float, top_p: float | None, seed: int | None, extra: str | None
) -> Form:
    """What all requests have in common. Raises `ConfigError`."""
    require(endpoint in _ENDPOINTS, f"--endpoint {endpoint}: give completions or chat")
    fields: dict[str, Any] = {"temperature": temperature}
    if top_p is not None:
        fields["top_p"] = top_p
    if seed is not None:
        fields["seed"] = seed
    if ignore_eos:
        fields["ignore_eos"] = True
    return Form(_ENDPOINTS[endpoint], fields | _extra_body(extra))


def parse_headers(given: Sequence[str]) -> dict[str, str]:
    """From "Name=value". Raises `ConfigError`."""
    headers = {}
    for item in given:
        name, separator, value = item.partition("=")
        require(bool(separator and name), f"--header {item}: write NAME=VALUE")
        headers[name] = value
    return headers


def parse_goodput(given: Sequence[str]) -> ServiceLevels:
    """From "ttft:500", several to an option where commas or spaces are between them. Raises `ConfigError`."""
    items = [item for text in given for item in text.replace(",", " ").split()]
    named = [":".join([_VLLM_NAMES.get(name, name), *rest]) for name, *rest in (item.split(":") for item in items)]
    return ServiceLevels.parse(named, "--goodput", ":")


def parse_shown(metrics: str, percentiles: str) -> Shown:
    """From "ttft,tpot" and "90,99". Raises `ConfigError`."""
    names = [_VLLM_NAMES.get(name.strip(), name.strip()) for name in metrics.split(",") if name.strip()]
    unknown = [name for name in names if name not in _METRICS]
    require(not unknown, f"--percentile-metrics {metrics}: {unknown} is unknown; known: {', '.join(_METRICS)}")
    try:
        found = [float(text) for text in percentiles.split(",") if text.strip()]
    except ValueError:
        found = [-1.0]
    require(
        all(0 < q < 100 for q in found),
        f"--metric-percentiles {percentiles}: give numbers between 0 and 100, as in 90,99",
    )
    return Shown(names, found)


def parse_servers(urls: Sequence[str], labels: Sequence[str]) -> list[tuple[str, str]]:
    """(label, URL) of each server; without labels, host and port. Raises `ConfigError`."""
    found = [parse_base_url("--base-url", url) for url in urls]
    require(
        not labels or len(labels) == len(found),
        f"{len(labels)} --label for {len(found)} --base-url: give one for each, or none",
    )
    names = list(labels) or [urlsplit(without_password(url)).netloc for url in found]
    if not labels and len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    require(len(set(names)) == len(names), "two --label are alike: give each server its own")
    require(not any("/" in name for name in names), "a --label has no slash: names of metrics have one")
    return list(zip(names, found, strict=True))


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-body is no JSON ({error}): give an object, as in '{{\"top_k\": 1}}'") from None
    if not isinstance(found, dict):
        raise ConfigError("--extra-body is no JSON object: write one, as in '{\"top_k\": 1}'")
    taken = [name for name in _OWN_FIELDS if name in found]
    require(not taken, f"--extra-body: {', '.join(taken)} is set by this command: leave it out")
    return found
