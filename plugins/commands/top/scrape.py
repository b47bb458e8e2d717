"""Reads the metrics of a server that is Dovetail's, vLLM's or another one with vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dovetail.commands.http import without_password
from dovetail.contracts.errors import ConfigError, DovetailError

KNOWN_METRIC = "vllm:num_requests_running"
"""A server that lacks it serves other metrics."""
Labels = tuple[tuple[str, str], ...]
"""Names and values, by name."""


@dataclass(frozen=True)
class Snapshot:
    """All samples of one reading."""

    time: float
    """time.monotonic()."""
    samples: Mapping[str, Mapping[Labels, float]]
    """Values by the sample's name, such as "vllm:prompt_tokens_total", and its labels."""

    def of(self, *names: str) -> Mapping[Labels, float]:
        """Samples of the first of `names` that there is: newer name first."""
        return next((self.samples[name] for name in names if name in self.samples), {})


NOTHING = Snapshot(0.0, {})
"""The state before a server's start."""


def metrics_url(text: str) -> str:
    """The address of a server's metrics: `text` may lack the scheme and the path. Raises `ConfigError`."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"{without_password(text)!r} is no address of a server: write http://host:port")
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith("/metrics") else f"{path}/metrics"))


def read(client: httpx.Client, url: str) -> Snapshot:
    """Reads once. Raises `DovetailError` where nobody answers, or answers with something else."""
    shown = without_password(url)
    try:
        response = client.get(url)
    except httpx.HTTPError as error:
        raise DovetailError(
            f"no answer from {shown} ({error}): is the server running, and is that its address?"
        ) from error
    if response.status_code != 200:
        raise DovetailError(
            f"{shown} answered {response.status_code} {response.reason_phrase}: it serves no metrics there"
        )
    try:
        snapshot = parse(response.text)
    except ValueError as error:
        raise DovetailError(f"{shown} serves no metrics in Prometheus' text format: {error}") from error
    if KNOWN_METRIC not in snapshot.samples:
        raise DovetailError(f"{shown} serves metrics, but none of an engine: {KNOWN_METRIC} is not among them")
    return snapshot


def parse(text: str) -> Snapshot:
    """Raises ValueError for what is not Prometheus' text format."""
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return Snapshot(time.monotonic(), samples)
