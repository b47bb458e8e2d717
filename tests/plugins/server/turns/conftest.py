"""A live server per family of chat models, whose model says what a request tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from dovetail import AsyncLLMEngine
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.plugins.routes.chat.route import ChatRoute
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.messages.route import MessagesRoute
from dovetail.plugins.routes.responses.route import ResponsesOptions, ResponsesRoute
from dovetail.plugins.routes.tokenize import TokenizeRoute
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.testing.chat_models import FAMILIES, MAX_LEN, Family, save_chat_model

SCRIPT = "dovetail.testing.scripted_output:Script"
ROUTES: dict[str, tuple[type[Route], PluginOptions]] = {
    "completions": (CompletionsRoute, CompletionsRoute.Options()),
    "chat": (ChatRoute, ChatRoute.Options()),
    "responses": (ResponsesRoute, ResponsesOptions()),
    "messages": (MessagesRoute, MessagesRoute.Options()),
    "tokenize": (TokenizeRoute, TokenizeRoute.Options()),
}


@dataclass
class Served:
    """A family's model behind a server."""

    engine: AsyncLLMEngine
    server: LiveServer
    client: httpx.Client
    cache: dict[str, list[int]] = field(default_factory=dict)

    def says(self, text: str) -> dict[str, Any]:
        """Fields of a request that has the model say this."""
        if text not in self.cache:
            self.cache[text] = asyncio.run(self.engine.tokenize(text, add_special_tokens=False))
        return {"processors": {"script": self.cache[text]}, "temperature": 0}

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer


@pytest.fixture(scope="session")
def serve(serve_family: Callable[[str, Family], Served]) -> Callable[[str], Served]:
    return lambda name: serve_family(name, FAMILIES[name])


@pytest.fixture(scope="session")
def serve_family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Of a name, a server is started once; `config` has more sections."""
    found: dict[str, Served] = {}
    with ExitStack() as stack:

        def get(name: str, family: Family, **config: Any) -> Served:
            if name not in found:
                directory = tmp_path_factory.mktemp(name)
                save_chat_model(directory, family)
                sections: dict[str, Any] = {
                    "model": {"path": str(directory), "dtype": "float32", "max_model_len": MAX_LEN},
                    "cache": {"num_blocks": 2000},
                    "executor": {"threads": 1},
                    "logits_processors": {"script": {"name": SCRIPT}},
                    **config,
                }
                engine = stack.enter_context(AsyncLLMEngine.from_config(sections))
                server = stack.enter_context(live_server(engine, ROUTES, model_names=("tiny",)))
                client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
                found[name] = Served(engine, server, client)
            return found[name]

        yield get


@pytest.fixture
def hermes(serve: Callable[[str], Served]) -> Served:
    return serve("hermes")


@pytest.fixture
def mistral(serve: Callable[[str], Served]) -> Served:
    return serve("mistral")


@pytest.fixture
def llama(serve: Callable[[str], Served]) -> Served:
    return serve("llama3_json")
