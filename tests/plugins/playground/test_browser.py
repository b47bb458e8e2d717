"""The playground in a real Chromium: `make test-browser`.

Conditions are waited for by locators: the page's policy forbids what playwright's `wait_for_function` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from dovetail import AsyncLLMEngine, RequestOutput
from dovetail.contracts.engine_client import EngineClient
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.testing.watched_engine import Script, WatchedEngine

from .conftest import ROUTES

pytestmark = pytest.mark.browser

PROMPT = "Once upon a time, there was a little girl named Lily. Once upon a time"
"""Its answers repeat what it says, so that lookups find something."""
Complete = Callable[..., RequestOutput]
SIZES = {"desktop": (1280, 800), "phone": (360, 740)}


@pytest.fixture
def open_page(browser: Any, server: LiveServer) -> Iterator[Callable[..., Any]]:
    """Opens the playground; no script may raise and nothing may break the page's policy."""
    problems: list[str] = []
    contexts: list[Any] = []

    def opened(size: str = "desktop", *, url: str = server.url, **options: Any) -> Any:
        width, height = SIZES[size]
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if "Content Security Policy" in m.text else None)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def connected(page: Any, *, mode: str = "raw") -> Any:
    """Knows what can be chosen. Arm A drafts, arm B does not."""
    page.locator("#model", has_text="story").wait_for()
    page.locator(f'input[name="mode"][value="{mode}"]').check(force=True)
    return page


def ask(page: Any, prompt: str = PROMPT, num_arms: int = 2) -> None:
    """Sends, and waits for the end of all answers."""
    before = page.locator(".answer.done").count()
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.locator(".answer.done").nth(before + num_arms - 1).wait_for()


def arm(page: Any, name: str) -> Any:
    return page.locator(f'.arm[data-arm="{name}"]')


def test_marked_text_is_what_the_engine_accepted(
    open_page: Callable[..., Any], engine: AsyncLLMEngine, complete: Complete
) -> None:
    page = connected(open_page())
    ask(page)
    output = complete(PROMPT, max_tokens=200)
    (completion,) = output.outputs
    texts = engine.token_texts(completion.token_ids)
    accepted = [texts[start + i] for start, count in completion.accepted_spans for i in range(count)]
    assert len(accepted) > 20
    drafting, plain = arm(page, "A"), arm(page, "B")
    assert drafting.locator(".output").text_content() == plain.locator(".output").text_content() == completion.text
    assert drafting.locator(".output .accepted").all_text_contents() == accepted
    assert plain.locator(".output .accepted").count() == 0
    assert drafting.locator(".rate dd").text_content() == f"{100 * output.metrics.acceptance_rate:.0f}%"
    assert drafting.locator(".length dd").text_content() == f"{output.metrics.mean_accepted_length:.2f}"
    assert drafting.locator(".tokens dd").text_content() == f"200 ({len(accepted)})"
    assert plain.locator(".rate dd").text_content() == "–"
    assert drafting.locator(".ttft dd").text_content().endswith(" ms")
    assert drafting.locator(".itl polyline").get_attribute("points")
    page.locator("#status", has_text="Same tokens.").wait_for()


def test_a_conversation_goes_on(open_page: Callable[..., Any], complete: Complete) -> None:
    page = connected(open_page(), mode="chat")
    arm(page, "A").locator('input[name="max_tokens"]').fill("9")
    page.locator('input[name="sides"][value="1"]').check(force=True)
    ask(page, "Once upon a time", 1)
    ask(page, "and then", 1)
    first, second = arm(page, "A").locator(".output").all_text_contents()

    assert first == complete("Once upon a time ", max_tokens=9).outputs[0].text
    assert second == complete(f"Once upon a time {first} and then ", max_tokens=9).outputs[0].text


@pytest.fixture
def stopping_server(engine: AsyncLLMEngine) -> Iterator[LiveServer]:
    """Requests are held after their first token, so that they run for as long as nobody stops them."""
    watched = WatchedEngine(engine)
    watched.script = Script(num_outputs=1)
    with live_server(watched, ROUTES, model_names=("story", "fable")) as live:
        yield live


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stopping_aborts_in_the_engine(
    how: str, open_page: Callable[..., Any], stopping_server: LiveServer, until_idle: Callable[[], None]
) -> None:
    page = connected(open_page(url=stopping_server.url))
    for name in "AB":
        arm(page, name).locator('input[name="max_tokens"]').fill("480")
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    arm(page, "B").locator(".output:not(:empty)").wait_for()
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    page.locator(".answer.done").nth(1).wait_for()
    until_idle()
    assert arm(page, "B").locator(".note").text_content() == "Stopped."
    assert page.locator("#send").is_disabled()
    assert page.locator("#stop").is_disabled()
    page.fill("#prompt", "again")
    assert page.locator("#send").is_enabled()


def test_an_error_is_shown_in_the_servers_words(open_page: Callable[..., Any]) -> None:
    page = connected(open_page())
    arm(page, "A").locator('input[name="temperature"]').fill("-1")
    ask(page)
    alert = arm(page, "A").get_by_role("alert")
    assert alert.text_content() == "temperature must be 0 (greedy) or more, got -1.0"
    assert arm(page, "B").get_by_role("alert").count() == 0


def answers_with(page: Any, events: list[tuple[str, list[tuple[str, bool]]]]) -> None:
    """Has the page see a stream of (new text, [(text of a token, whether it was accepted)])."""
    body = "data: [DONE]\n\n"
    for text, given in reversed(events):
        tokens = [{"text": each, "accepted": accepted} for each, accepted in given]
        choice = {"text": text, "finish_reason": None, "tokens": tokens}
        body = f"data: {json.dumps({'choices': [choice]})}\n\n{body}"
    page.route("**/v1/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def test_what_the_model_says_is_no_markup(open_page: Callable[..., Any]) -> None:
    page = connected(open_page())
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    answers_with(page, [(text, [(text, True)])])
    ask(page, text)
    assert arm(page, "A").locator(".accepted").text_content() == text
    assert page.locator("#arms img, #arms b").count() == 0


def test_characters_of_several_tokens_are_shown_whole(open_page: Callable[..., Any]) -> None:
    """Bytes of a character read U+FFFD each, and the text has the character once it is complete."""
    page = connected(open_page())
    events = [
        ("a", [("a", False), ("\ufffd", True)]),
        ("", [("\ufffd", True)]),
        ("\u00e9 b", [(" b", False), ("</s>", False)]),
    ]
    answers_with(page, events)
    ask(page)
    assert arm(page, "A").locator(".output").text_content() == "a\u00e9 b"
    assert arm(page, "A").locator(".accepted").all_text_contents() == ["\u00e9"]


def test_text_that_comes_after_its_tokens_is_marked_too(open_page: Callable[..., Any]) -> None:
    """As where a stop string could begin in it."""
    page = connected(open_page())
    answers_with(page, [("", [("on", True), ("ce", False)]), ("on", []), ("ce up", [(" up", True), ("on", False)])])
    ask(page)
    assert arm(page, "A").locator(".output").text_content() == "once up"
    assert arm(page, "A").locator(".accepted").all_text_contents() == ["on", " up"]


def test_the_keyboard_is_enough(open_page: Callable[..., Any]) -> None:
    page = connected(open_page())
    page.locator("#prompt").focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#prompt").input_value() == "one\ntwo"
    names, controls = set(), set()
    for _ in range(40):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "document.activeElement.tagName + (document.activeElement.name || document.activeElement.id)"
        )
        controls.add(name)
        names.add(page.evaluate("document.activeElement.closest('[data-arm]')?.dataset.arm"))
    wanted = {"INPUTmode", "INPUTsides", "SELECTmodel", "SELECTspeculation", "INPUTtemperature", "INPUTseed"}
    assert wanted | {"BUTTONsend", "BUTTONclear", "INPUTin-turn", "TEXTAREAprompt"} <= controls
    assert {"A", "B"} <= names


def test_every_field_has_a_name_of_its_own(open_page: Callable[..., Any]) -> None:
    page = connected(open_page())
    for label in ("Model", "Drafter", "Temperature", "Max tokens", "Seed"):
        assert page.get_by_label(label, exact=True).count() == 2
    assert page.get_by_label("Prompt for all arms").count() == 1
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    log = arm(page, "A").get_by_role("log")
    assert log.get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("size", SIZES)
def test_nothing_moves_while_an_answer_comes(size: str, open_page: Callable[..., Any]) -> None:
    """The frame of the page stays, and the page itself never scrolls; a long answer scrolls in its arm."""
    page = connected(open_page(size))
    num_arms = page.locator(".arm:visible").count()
    places = """['header', '#metrics', '.arm', '#composer'].map((each) => {
        const box = document.querySelector(each).getBoundingClientRect();
        return [box.x, box.y, box.width, box.height];
    })"""
    before = page.evaluate(places)
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    arm(page, "A").locator(".output:not(:empty)").wait_for()
    during = page.evaluate(places)
    page.locator(".answer.done").nth(num_arms - 1).wait_for()
    assert before == during == page.evaluate(places)
    for _ in range(3):
        ask(page, PROMPT, num_arms)
    log = arm(page, "A").locator(".log")
    assert log.evaluate("(log) => log.scrollHeight > log.clientHeight")
    assert log.evaluate("(log) => log.scrollHeight - log.scrollTop - log.clientHeight") < 2
    root = "document.documentElement"
    assert page.evaluate(f"{root}.scrollWidth <= innerWidth && {root}.scrollHeight <= innerHeight")


def test_who_has_scrolled_up_stays_there(open_page: Callable[..., Any]) -> None:
    page = connected(open_page())
    ask(page)
    ask(page)
    log = arm(page, "A").locator(".log")
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    arm(page, "A").locator(".output").nth(2).locator("span").first.wait_for()
    log.evaluate("(log) => { log.scrollTop = 0; }")
    page.locator(".answer.done").nth(5).wait_for()
    assert log.evaluate("(log) => log.scrollTop") == 0


def test_the_key_is_asked_for_and_forgotten_with_the_tab(open_page: Callable[..., Any], engine: EngineClient) -> None:
    with live_server(engine, ROUTES, model_names=("story",), api_keys=("secret",)) as guarded:
        page = open_page(url=guarded.url)
        page.locator("#problem", has_text="this server wants an API key").wait_for()
        page.locator("#key").wait_for()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        connected(page)
        assert page.locator("#problem").text_content() == ""
        ask(page)
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


def test_live_metrics_are_those_of_the_server_until_paused(open_page: Callable[..., Any]) -> None:
    page = connected(open_page())
    ask(page)
    page.locator('[data-value="running"]', has_text="0").wait_for()
    page.locator('[data-value="usage"]', has_text="%").wait_for()
    page.locator('[data-value="drafters"]', has_text="lookup").wait_for()
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    assert pause.get_attribute("aria-pressed") == "true"
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/metrics") else None)
    ask(page)
    assert asked == []
    with page.expect_request("**/metrics"):
        pause.click()


def test_arms_in_turn_never_run_at_once(open_page: Callable[..., Any], client: httpx.Client) -> None:
    page = connected(open_page())
    page.check("#in-turn")
    responses: list[Any] = []
    page.on("response", lambda response: responses.append(response) if "completions" in response.url else None)
    ask(page)
    page.locator("#status", has_text="Same tokens.").wait_for()
    ids = [response.headers["x-request-id"] for response in responses]
    first, second = (client.get(f"/v1/explain/{each}").json()["requests"][0] for each in ids)
    assert first["arrival"] + first["times"]["total_s"] < second["arrival"]
    assert "shared the machine" not in page.locator("#status").text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str, open_page: Callable[..., Any]) -> None:
    """Contrast of text and of marked text with its ground, by WCAG's formula: at least 4.5."""
    page = connected(open_page(color_scheme=scheme))
    ask(page)

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = {".accepted": ".accepted", ".output": ".arm", ".stats dt": ".stats", ".question": ".arm", "#keys": "body"}
    for text, ground in pairs.items():
        front = page.locator(text).first.evaluate("(each) => getComputedStyle(each).color")
        back = page.locator(ground).first.evaluate("(each) => getComputedStyle(each).backgroundColor")
        low, high = sorted([luminance(front), luminance(back)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, front, back)
