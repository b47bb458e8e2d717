"""A server of OpenAI's API on a real socket, that does what the name of the model says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class ScriptedServer:
    """Token i of a reply is "<i>". What the model's name holds:

    "usage": a count at the end; "running": with each chunk; "pairs": two tokens in a chunk; "halves": each event in two
    packets; "crlf": its lines end so; "short": one token less than asked for; "strict": refuses stream_options.
    Faults, of prompts that hold "fault": "500", "429", "cut" (the connection, after two tokens), "unended" (no end is
    told), "told" (an error as an event), "nothing" (no token), "garbage", "hang" (until the client goes).
    "once": only until the prompt comes again.
    """

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    on_request: Callable[[dict[str, Any]], None] = lambda body: None
    seen: dict[str, int] = field(default_factory=dict)

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        is_chat = "messages" in body
        prompt = str(body["messages"][0]["content"] if is_chat else body["prompt"])
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.seen[prompt] = self.seen.get(prompt, 0) + 1
        self.on_request(body)
        model = body["model"]
        if "strict" in model and "stream_options" in body:
            return JSONResponse({"error": {"message": "unknown field stream_options"}}, 400)
        fails = "fault" in prompt and ("once" not in model or self.seen[prompt] == 1)
        if fails and "500" in model:
            return JSONResponse({"error": {"message": "it broke", "type": "server_error"}}, 500)
        if fails and "429" in model:
            return JSONResponse({"error": {"message": "too many"}}, 429, headers={"Retry-After": "0"})
        count = 0 if fails and "nothing" in model else body.get("max_tokens", 16) - ("short" in model)
        if not body.get("stream"):
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            await asyncio.sleep(0)
            self.in_flight -= 1
            choice = {"index": 0, "finish_reason": "length", "text": "".join(f"<{i}>" for i in range(count))}
            return JSONResponse({"id": "x", "object": "text_completion", "choices": [choice], "usage": usage(9, count)})
        return StreamingResponse(self.stream(body, count, is_chat, fails), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], count: int, is_chat: bool, fails: bool) -> AsyncIterator[bytes]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        model, options = body["model"], body.get("stream_options") or {}
        try:
            if is_chat:
                yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            size = 2 if "pairs" in model else 1
            for begin in range(0, count, size):
                if fails and begin == 2:
                    if "cut" in model:
                        raise RuntimeError("cut")
                    if "told" in model:
                        yield event({"error": {"message": "out of memory"}})
                        return
                    if "hang" in model:
                        await asyncio.Event().wait()
                    if "garbage" in model:
                        yield b"data: {]\n\n"
                        return
                    if "unended" in model:
                        return
                done = min(count, begin + size)
                text = "".join(f"<{i}>" for i in range(begin, done))
                choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
                chunk: dict[str, Any] = {"choices": [choice | {"finish_reason": None if done < count else "length"}]}
                if "running" in model and options.get("continuous_usage_stats"):
                    chunk["usage"] = usage(9, done)
                data = event(chunk)
                if "crlf" in model:
                    data = data.replace(b"\n", b"\r\n")
                pieces = [data[:20], data[20:]] if "halves" in model else [data]
                for piece in pieces:
                    yield piece
                    await asyncio.sleep(0)
            if count == 0:
                yield event({"choices": [{"text": "", "finish_reason": "stop"}]})
            if ("usage" in model or "running" in model) and options.get("include_usage"):
                yield event({"choices": [], "usage": usage(9, count)})
            yield b"data: [DONE]\n\n"
        finally:
            self.in_flight -= 1

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "usage"}]})

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": list((await request.json())["prompt"].encode())})

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": bytes((await request.json())["tokens"]).decode()})


def usage(prompt: int, completion: int) -> dict[str, Any]:
    details = {"cached_tokens": 4}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def run_server(scripted: ScriptedServer) -> Iterator[ScriptedServer]:
    routes = [
        Route("/v1/completions", scripted.generate, methods=["POST"]),
        Route("/v1/chat/completions", scripted.generate, methods=["POST"]),
        Route("/v1/models", scripted.models),
        Route("/tokenize", scripted.tokenize, methods=["POST"]),
        Route("/detokenize", scripted.detokenize, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    is_up = threading.Event()

    async def serve() -> None:
        startup = server.startup

        async def tell(sockets: Any = None) -> None:
            await startup(sockets)
            is_up.set()

        server.startup = tell  # type: ignore[method-assign]
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_up.wait(60)
    port = server.servers[0].sockets[0].getsockname()[1]
    scripted.url = f"http://127.0.0.1:{port}"
    try:
        yield scripted
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    yield from run_server(ScriptedServer())


@pytest.fixture
def other_server() -> Iterator[ScriptedServer]:
    yield from run_server(ScriptedServer())
