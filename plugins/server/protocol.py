"""uvicorn's HTTP protocol with limits on headers: their time and their size."""

from __future__ import annotations

from asyncio import BaseTransport, TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dovetail.contracts.route import APIError
from dovetail.plugins.server.errors import error_body

MAX_HEADER_BYTES = 64 * 1024


def limited_protocol(header_timeout_s: float) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn, which creates one per connection and hands it no settings of ours."""

    class LimitedProtocol(HeaderLimits):
        timeout_s = header_timeout_s

    return LimitedProtocol


class HeaderLimits(HttpToolsProtocol):
    """Closes a connection whose request line and headers take too long, or are too long. What follows a chunked body
    (trailers) is read over: it is no header of the request, and what checked the headers did not see it."""

    timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._header_timer: TimerHandle | None = None
        self._num_header_bytes = 0
        """Of this request's headers; then those that came since the last part of its body."""
        self._reads_headers = True

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_header_bytes += len(data)
        super().data_received(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._reads_headers:  # another request on this connection
            self._reads_headers = True
            self._num_header_bytes = 0
        if self._header_timer is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_headers:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._reads_headers = False
        self._num_header_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the shape of all errors."""
        self._refuse(400, msg)

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.timeout_s, self._on_slow_headers)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_slow_headers(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"the headers did not arrive within {self.timeout_s:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        body = error_body(APIError(status, message))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
