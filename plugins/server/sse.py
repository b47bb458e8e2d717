"""Server-sent events: a response of frames that are bytes already."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
"""The last frame of OpenAI's streams that ended well."""

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(data: bytes) -> bytes:
    """One event. `data` has no line breaks."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event with a name. `data` has no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(StreamingResponse):
    """Sends frames as they come. While the client does not read, `send` waits, so that no frame is asked for and the
    engine merges what nobody has read."""

    def __init__(self, frames: AsyncGenerator[bytes, None]):
        super().__init__(frames, headers=_HEADERS, media_type="text/event-stream")
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Awaits the first frame before the status is sent: what raises before becomes an error response."""
        try:
            first = await anext(self._frames, b"")
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._frames.aclose()
