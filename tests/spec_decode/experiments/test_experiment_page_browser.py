"""The page of an experiment with five arms in a real Chromium: `make test-browser`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_experiment_runs import experiment, folder, run

__all__ = ["folder"]

pytestmark = pytest.mark.browser

LOOKUP = {"name": "ngram", "min_match": 1}
ARMS = {
    "lookup": {"drafter": "lookup"},
    "short": {"drafter": {**LOOKUP, "max_match": 2}, "num_tokens": 2},
    "adaptive": {"drafter": {**LOOKUP, "length": "adaptive"}, "num_tokens": 3},
    "suffix-with-a-long-name": {"drafter": {"name": "suffix"}, "num_tokens": 8},
    "one": {"drafter": {**LOOKUP}, "num_tokens": 1},
}
CONTRAST = """element => {
  const channels = color => color.match(/[\\d.]+/g).slice(0, 3).map(value => value / 255)
    .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([red, green, blue]) => 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  const style = getComputedStyle(element), paper = getComputedStyle(document.body).backgroundColor;
  const [text, back] = [style.fill === "rgb(0, 0, 0)" ? style.color : style.fill, paper].map(c => light(channels(c)));
  return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
}"""
"""Contrast of an element's text with the page, as WCAG 2.1 defines it."""


@pytest.fixture(scope="module")
def report(folder: Path) -> Path:
    run(folder, experiment(arms=ARMS, grid={"batch_sizes": [1, 2]}, repetitions=2, compatibility=True), "five")
    return folder / "five.html"


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=request.param)
    opened = context.new_page()
    opened.goto(report.as_uri())
    yield opened
    context.close()


def test_the_verdicts_and_the_forest_are_on_the_first_screen(page: Any) -> None:
    verdicts = page.locator(".verdicts").bounding_box()
    forest = page.locator("svg").first.bounding_box()
    assert 0 < verdicts["y"] < forest["y"]
    assert forest["y"] + forest["height"] <= 800


def test_five_arms_fit_into_the_width(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    outside = "parts => parts.filter(part => part.scrollWidth > part.clientWidth).map(part => part.innerText)"
    assert page.locator(".scroll").evaluate_all(outside) == []


def test_text_is_legible(page: Any) -> None:
    for selector in ("h1", "h2", ".verdicts li", "td", ".notes", "svg .title", "svg text"):
        assert page.locator(selector).first.evaluate(CONTRAST) >= 4.5, selector


def test_no_label_of_a_plot_leaves_its_picture(page: Any) -> None:
    outside = """pictures => pictures.flatMap(picture => {
      const whole = picture.getBoundingClientRect();
      return [...picture.querySelectorAll("text")].filter(text => {
        const own = text.getBoundingClientRect();
        return own.left < whole.left - 1 || own.right > whole.right + 1 || own.bottom > whole.bottom + 1;
      }).map(text => text.textContent);
    })"""
    assert page.locator("svg").evaluate_all(outside) == []


def test_provenance_is_the_last_section(page: Any) -> None:
    assert page.locator("h2").last.inner_text() == "Provenance"
