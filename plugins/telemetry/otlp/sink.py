"""Telemetry sink `otlp`: a trace of each request for OpenTelemetry, sent by OTLP.

This module needs no package of OpenTelemetry, so that a missing one is a reason and no error of an import.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.telemetry import EngineDescription, RequestStats, TelemetrySink

_PACKAGES = {
    "http/protobuf": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "grpc": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc"),
}


class OTLPOptions(PluginOptions):
    """Options of `otlp`."""

    endpoint: str | None = Field(
        default=None,
        description="URL of the collector; for http/protobuf one without a path means its /v1/traces. By default that "
        "of the variables of OpenTelemetry, or else this machine's port 4318, for grpc 4317.",
    )
    protocol: Literal["http/protobuf", "grpc"] = Field(default="http/protobuf", description="How OTLP is carried.")
    headers: Mapping[str, str] = Field(
        default={},
        description="Headers of each export. Secrets go in the variable OTEL_EXPORTER_OTLP_HEADERS, which is read "
        "where this is empty.",
    )
    service_name: str = Field(default="dovetail", description="The resource's service.name.")
    model_name: str | None = Field(
        default=None, description="The model in names and attributes of spans; by default the config's model.path."
    )
    timeout_s: float = Field(default=10.0, gt=0, description="Seconds that one export may take, with its repeats.")
    queue_size: int = Field(
        default=2048, ge=1, description="Requests that wait to be sent; while so many do, further ones are dropped."
    )
    flush_s: float = Field(
        default=5.0, ge=0, description="Seconds that the end of the engine waits for what is unsent."
    )


class OTLPSink(TelemetrySink):
    """Hands each request that ended to a thread, which makes its spans and sends them."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = OTLPOptions

    @classmethod
    def check(cls, need: Any, options: Any, environment: Environment) -> list[str]:
        """OpenTelemetry's packages must be installed, and the endpoint must be a URL."""
        reasons = []
        missing = [name for name in _PACKAGES[options.protocol] if not _is_installed(name)]
        if missing:
            reasons.append(
                f"protocol {options.protocol} needs {' and '.join(missing)}, not installed:"
                " pip install 'dovetail[otlp]'"
            )
        if options.endpoint is not None and not _is_url(options.endpoint):
            reasons.append(f"endpoint {options.endpoint!r} is no URL: write http://host:port or https://host:port")
        return reasons

    def __init__(self, options: OTLPOptions):
        super().__init__(options)
        from dovetail.plugins.telemetry.otlp.sender import Sender, create_exporter
        from dovetail.plugins.telemetry.otlp.spans import SpanMaker

        self._options = options
        self._spans = SpanMaker(options.service_name)
        exporter = create_exporter(options.protocol, options.endpoint, options.headers, options.timeout_s)
        self._sender = Sender(exporter, self._spans.spans_of, options.queue_size)

    def on_start(self, engine: EngineDescription) -> None:
        """Learns the model's name."""
        self._spans.model = self._options.model_name if self._options.model_name is not None else engine.model

    def on_request(self, stats: RequestStats) -> None:
        """Has the request sent. Does not wait: where too many wait, the request is dropped, and a warning says so."""
        self._sender.put(stats)

    def close(self) -> None:
        """Waits for what is unsent, `flush_s` seconds at most."""
        self._sender.close(self._options.flush_s)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
