"""The thread that sends spans. Nobody waits for it but `close`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter

from dovetail.contracts.telemetry import RequestStats

logger = logging.getLogger(__name__)

_BATCH = 256
"""Most requests of one export."""
_LINGER_S = 1.0
"""How long an export waits for further requests, since the first."""


def create_exporter(protocol: str, endpoint: str | None, headers: Mapping[str, str], timeout_s: float) -> SpanExporter:
    """OpenTelemetry's own exporter."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GRPCExporter

        lower = {name.lower(): value for name, value in headers.items()}  # as gRPC wants them
        return GRPCExporter(endpoint=endpoint, headers=lower or None, timeout=timeout_s)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint, headers=dict(headers) or None, timeout=timeout_s)


class Sender:
    """A bounded queue of requests, and the thread that exports them."""

    def __init__(self, exporter: SpanExporter, spans_of: Callable[[RequestStats], list[ReadableSpan]], queue_size: int):
        self._exporter = exporter
        self._spans_of = spans_of
        self._queue_size = queue_size
        self._changed = threading.Condition()
        """Guards the three below."""
        self._waiting: deque[RequestStats] = deque()
        self._num_dropped = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="dovetail-otlp", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Requests that found the queue full."""
        return self._num_dropped

    def put(self, stats: RequestStats) -> None:
        """Has a request sent, or drops it. Does not wait."""
        with self._changed:
            if len(self._waiting) < self._queue_size:
                self._waiting.append(stats)
                self._changed.notify()
                return
            self._num_dropped += 1
            is_first = self._num_dropped == 1
        if is_first:
            logger.warning(
                "telemetry sink otlp drops traces: %d requests wait to be sent, since the collector is slow or gone; "
                "this is said once",
                self._queue_size,
            )

    def close(self, timeout_s: float) -> None:
        """Sends what waits, and stops; what is not sent after `timeout_s` seconds is dropped. Idempotent."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                num_unsent = len(self._waiting)
                self._waiting.clear()
            logger.warning("telemetry sink otlp ends before its last traces are sent (%d wait)", num_unsent)
        self._exporter.shutdown()  # ends an export that waits for its next try

    def _run(self) -> None:
        while batch := self._next_batch():
            spans = [span for stats in batch for span in self._spans_of(stats)]
            try:
                if spans:
                    self._exporter.export(spans)
            except Exception:  # exporters log failures and raise nothing; whatever comes, the next batch goes out
                logger.exception("telemetry sink otlp could not send traces")

    def _next_batch(self) -> list[RequestStats]:
        """Empty once all is sent and the sender closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            self._changed.wait_for(lambda: len(self._waiting) >= _BATCH or self._is_closing, _LINGER_S)
            return [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
