"""The playground: a static page at /, and what it asks that no other route tells."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.errors import RequestError
from dovetail.contracts.route import Route

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES: Final = (
    "index.html",
    "style.css",
    "icon.svg",
    "align.js",
    "answer.js",
    "api.js",
    "app.js",
    "arm.js",
    "metrics.js",
    "sparkline.js",
)
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""no-cache: a browser keeps the files, and asks whether they are still the same."""


def _path(name: str) -> str:
    return "/" if name == "index.html" else f"/playground/{name}"


class PlaygroundRoute(Route):
    """GET / and its files, which need no API key; /playground/facts, which does."""

    contract = (1, 0)
    open_paths = frozenset(map(_path, _FILES))

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["playground"])
        for name in _FILES:
            endpoint = StaticFile.load(name).endpoint()
            router.get(_path(name))(endpoint)
            router.head(_path(name), include_in_schema=False)(endpoint)
        router.get("/playground/facts")(self.facts)
        return router

    async def facts(self) -> dict[str, Any]:
        """What can be chosen on the page."""
        engine = self.host.engine
        facts = engine.facts
        adapters = await engine.list_loras() if facts.max_loras else []
        return {
            "models": [*self.host.model_names, *(adapter.name for adapter in adapters)],
            "max_model_len": facts.max_model_len,
            "drafters": facts.drafters,
            "default_drafter": facts.default_drafter,
            "acceptance": facts.acceptance,
            "accepts_sampling": facts.accepts_sampling,
            "no_chat": await self._why_no_chat(),
        }

    async def _why_no_chat(self) -> str | None:
        """Why the model cannot chat; None where it can."""
        try:
            await self.host.engine.render_chat([{"role": "user", "content": "?"}], add_generation_prompt=True)
        except RequestError as error:
            return str(error)
        return None


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file that a browser keeps until its content changes."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def load(cls, name: str) -> StaticFile:
        """One of the files of this package."""
        content = resources.files(__package__).joinpath(name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:32]
        return cls(content, _TYPES[name.rpartition(".")[2]], f'"{digest}"')

    def endpoint(self) -> Callable[[Request], Awaitable[Response]]:
        """What answers for the file."""

        async def send(request: Request) -> Response:
            headers = {**_HEADERS, "etag": self.etag}
            if self._is_known(request.headers.get("if-none-match", "")):
                return Response(status_code=304, headers=headers)
            return Response(self.content, headers={**headers, "content-type": self.media_type})

        return send

    def _is_known(self, if_none_match: str) -> bool:
        given = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
        return "*" in given or self.etag in given
