"""The page's plots: what they draw is what the requests' records say."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.spec_decode.experiments.page.forest import Effect, Row, forest
from dovetail.spec_decode.experiments.page.request_views import (
    decode_steps,
    length_shares,
    lengths_by_place,
    place_width,
    prompt_views,
)
from dovetail.spec_decode.experiments.page.scatter import Dot, Panel, scatter
from dovetail.spec_decode.experiments.records import RequestRecord

step_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=12)


def record(sizes: list[int], prompt: int = 0, repetition: int = 0, seconds: float = 0.5) -> RequestRecord:
    """A request whose steps bring so many tokens, `seconds` apart."""
    times = [(step + 1) * seconds for step, size in enumerate(sizes) for _ in range(size)]
    return RequestRecord("mine", 4, 1, repetition, prompt, prompt, "any", [0] * len(times), times, 0, 0, [], "length")


@given(step_sizes)
def test_decode_steps_are_those_between_the_first_step_and_the_last(sizes: list[int]) -> None:
    found = decode_steps(record(sizes))
    assert [step.tokens for step in found] == sizes[1:-1]
    assert [step.start for step in found] == [sum(sizes[:index]) for index in range(1, len(sizes) - 1)]


@given(st.lists(step_sizes, max_size=6))
def test_shares_of_lengths_have_the_mean_of_all_steps(requests: list[list[int]]) -> None:
    steps = [size for sizes in requests for size in sizes[1:-1]]
    shares = length_shares([record(sizes) for sizes in requests])
    assert len(shares) == max(steps, default=0)
    assert math.fsum(shares) == pytest.approx(1.0 if steps else 0.0)
    mean = sum(steps) / len(steps) if steps else 0.0
    assert sum((index + 1) * share for index, share in enumerate(shares)) == pytest.approx(mean)


def test_a_place_in_the_output_that_few_prompts_reach_is_not_shown() -> None:
    short, long = [1, 2, 2, 1], [1, 2, 2, 4, 4, 1]
    records = [record(short, prompt) for prompt in range(4)] + [record(long, 4)]
    assert lengths_by_place(records, width=5) == [(2.5, 2.0)]


def test_places_divide_the_longest_output() -> None:
    assert place_width([record([1] * 120), record([1] * 10)]) == 10
    assert place_width([]) == 1


def test_a_prompt_is_as_much_faster_as_its_requests_are() -> None:
    baseline = [record([1, 1, 1, 1], seconds=1.0), record([1, 1, 1, 1], repetition=1, seconds=2.0)]
    own = [record([1, 2, 1], seconds=1.0), record([1, 3], repetition=1, seconds=1.0)]
    (view,) = prompt_views(own, baseline)
    # 4 tokens in 3 s and in 2 s, in place of 4 s and 8 s.
    assert view.speedup == pytest.approx(math.sqrt((4 / 3) * (8 / 2)))
    assert view.accepted_length == pytest.approx(6 / 3)


def test_a_prompt_that_the_baseline_never_ran_is_left_out() -> None:
    assert prompt_views([record([1, 2, 1], prompt=3)], [record([1, 2, 1], prompt=2)]) == []


def texts_of(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter("text")]


def test_the_forest_has_a_row_per_arm_and_says_what_was_not_measured() -> None:
    effects = [Effect(1.2, (1.1, 1.3), "faster"), None]
    rows = [Row("a", "identical"), Row("b", "LOSSY")]
    texts = texts_of(forest("Ratio", rows, {"tokens/s": effects, "ttft": [None, None]}))
    assert [texts.count(text) for text in ("a", "b", "1.20 [1.10, 1.30]", "not measured")] == [1, 1, 1, 3]


def test_the_forest_shows_each_verdict_and_what_its_colour_means() -> None:
    effects = [Effect(1.2, (1.1, 1.3), "faster"), Effect(0.8, (0.7, 0.9), "slower"), Effect(1.0, None, "undecided")]
    rows = [Row("a", "identical"), Row("b", "LOSSY"), Row("c", "-")]
    root = ElementTree.fromstring(forest("Ratio", rows, {"tokens/s": effects}))
    dots = [(circle.get("class"), circle.findtext("title")) for circle in root.iter("circle")]
    assert [title for _, title in dots if title is not None] == ["faster", "slower", "undecided or not judged"]
    legend = {style for style, title in dots if title is None}
    assert legend == {style for style, title in dots if title is not None}
    texts = {element.text: element.get("class") for element in root.iter("text")}
    assert {"tokens", "faster", "slower", "undecided or not judged"} <= texts.keys()
    assert [texts[row.tokens] for row in rows] == ["good", "bad", None]


def test_an_interval_beyond_the_axis_ends_in_an_arrow_within_the_picture() -> None:
    picture = forest("Ratio", [Row("a", "identical")], {"tokens/s": [Effect(1.0, (0.01, 50.0), "undecided")]})
    paths = [element.get("d", "") for element in ElementTree.fromstring(picture).iter("path")]
    assert sum(path.endswith("z") for path in paths) == 2
    assert "nan" not in picture


@given(st.floats(0.01, 100))
def test_every_ratio_lies_within_its_panel(ratio: float) -> None:
    root = ElementTree.fromstring(
        forest("Ratio", [Row("a", "identical")], {"tokens/s": [Effect(ratio, None, "undecided")]})
    )
    (dot,) = (circle for circle in root.iter("circle") if circle.find("title") is not None)
    assert 0 <= float(dot.get("cx", "nan")) <= float(root.get("width", "nan"))


def test_the_scatter_has_a_panel_per_arm_with_all_its_prompts() -> None:
    panels = [Panel(name, [Dot(1.0 + n, 0.9, f"prompt {n}") for n in range(4)]) for name in "abcde"]
    root = ElementTree.fromstring(scatter("Prompts", panels, "length", "speed-up", mark=1.0))
    assert len(list(root.iter("circle"))) == 20
    assert [text for text in texts_of(ElementTree.tostring(root, encoding="unicode")) if text in "abcde"] == list(
        "abcde"
    )
