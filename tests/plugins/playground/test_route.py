"""The playground's route: its files as they go over the wire, and what it tells the page."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import httpx
import pytest

from dovetail import AsyncLLMEngine
from dovetail.plugins.routes.playground.route import PlaygroundRoute
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.testing.route_suite import RouteSuite

PATHS = sorted(PlaygroundRoute.open_paths)
PACKAGE = "dovetail.plugins.routes.playground"


class TestConformance(RouteSuite):
    plugin = PlaygroundRoute
    serve = staticmethod(live_server)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_is_sent_with_a_strict_policy(path: str, client: httpx.Client) -> None:
    response = client.get(path)
    assert response.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert not re.search(r"unsafe|\*|https?:|data:", response.headers["content-security-policy"])
    assert {"script-src", "style-src", "connect-src"}.isdisjoint(policy)
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", PATHS)
def test_a_browser_that_has_a_file_gets_it_only_when_it_changed(path: str, client: httpx.Client) -> None:
    first = client.get(path)
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = client.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert client.get(path, headers={"if-none-match": '"other"'}).content == first.content


@pytest.mark.parametrize("path", PATHS)
def test_head_says_what_get_says_without_a_body(path: str, client: httpx.Client) -> None:
    get, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-type", "content-length", "content-security-policy", "cache-control"):
        assert head.headers[name] == get.headers[name]


def test_every_file_of_the_package_is_served() -> None:
    names = {entry.name for entry in resources.files(PACKAGE).iterdir()} - {"__init__.py", "route.py", "__pycache__"}
    assert {"/" if name == "index.html" else f"/playground/{name}" for name in names} == set(PATHS)


def test_all_that_files_refer_to_is_served_here(client: httpx.Client) -> None:
    """No other origin, and no path from the root: the page works behind a proxy that adds a prefix."""
    html = client.get("/").text
    referred = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert {f"/{path}" for path in referred} <= set(PATHS)
    for path in PATHS:
        text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//cdn|@import|url\(", text), path
        for module in re.findall(r'from "(.*?)"', text):
            assert f"/playground/{module.removeprefix('./')}" in PATHS


def test_no_script_makes_markup_of_text(client: httpx.Client) -> None:
    for path in PATHS:
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", client.get(path).text
        )
        assert found is None, path


def test_facts_are_what_can_be_chosen(client: httpx.Client) -> None:
    assert client.get("/playground/facts").json() == {
        "models": ["story", "fable"],
        "max_model_len": 512,
        "drafters": ["lookup", "short"],
        "default_drafter": "lookup",
        "acceptance": "rejection",
        "accepts_sampling": True,
        "no_chat": None,
    }


def test_files_are_open_and_what_they_ask_is_not(engine: AsyncLLMEngine) -> None:
    routes: Any = {"playground": (PlaygroundRoute, PlaygroundRoute.Options())}
    with (
        live_server(engine, routes, api_keys=("secret",)) as live,
        httpx.Client(base_url=live.url, timeout=60) as client,
    ):
        assert {client.get(path).status_code for path in PATHS} == {200}
        assert client.get("/playground/facts").status_code == 401
        assert client.get("/playground/facts", headers={"authorization": "Bearer secret"}).status_code == 200


def test_modules_are_small(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert max(len(client.get(path).text.splitlines()) for path in PATHS if path.endswith(".js")) < 300
