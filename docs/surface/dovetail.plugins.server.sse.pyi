from collections.abc import AsyncGenerator
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b'data: [DONE]\n\n'
def event(data: bytes) -> bytes: ...

class EventStream(StreamingResponse):
    def __init__(self, frames: AsyncGenerator[bytes, None]): ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...
