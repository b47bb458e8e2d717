"""The built site in Chromium, as somebody reads it without a server and without a network."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.plugins.commands.docs.command import SITE

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def start() -> str:
    """Address of the start page; `make test-browser` builds the site."""
    assert (SITE / "index.html").exists(), "build it first: make site"
    return (SITE / "index.html").as_uri()


@pytest.fixture
def page(browser: Any) -> Any:
    """A tab that counts what it asks for; nothing but files can be had."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.asked = []
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    context.close()


def test_the_search_finds_a_contract(page: Any, start: str) -> None:
    page.goto(start)
    page.get_by_placeholder("Search").click()
    page.keyboard.type("num_missing_blocks")
    found = page.locator(".md-search-result__item a").filter(has_text="num_missing_blocks").first
    found.click()
    page.wait_for_url("**/contracts/scheduler.html*")
    assert [url for url in page.asked if not url.startswith(("file:", "data:", "about:", "blob:"))] == []


def test_a_link_in_a_guide_leads_to_the_contract_and_to_a_source(page: Any, start: str) -> None:
    page.goto(start.replace("index.html", "writing/schedulers.html"))
    page.locator("article a", has_text="scheduler.py").first.click()
    assert page.locator("h1").inner_text().startswith("Scheduler")
    page.go_back()
    page.locator("article a", has_text="weighted fair queueing").first.click()
    assert "class FairQueueing" in page.locator("article").inner_text()


def test_no_page_is_wider_than_a_telephone(page: Any, start: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    for name in ("index", "compatibility", "contracts/attention", "writing/from-vllm", "results"):
        page.goto(start.replace("index.html", f"{name}.html"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
