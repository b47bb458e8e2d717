"""Stop strings must not depend on how the text arrives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.engine.tokenization.stop_strings import StopChecker

small_text = st.text("ab\n", max_size=20)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def first_stop(chunks: list[str], stop: tuple[str, ...], num_free: int) -> tuple[str | None, int, int]:
    """By brute force: the stop string, where it begins, and where it ends (or the text does). The first `num_free`
    pieces complete none."""
    for index in range(num_free, len(chunks)):
        old, text = "".join(chunks[:index]), "".join(chunks[: index + 1])
        for candidate in stop:
            for start in range(len(text)):
                end = start + len(candidate)
                if text[start:end] == candidate and end > len(old):
                    return candidate, start, end
    return None, len("".join(chunks)), len("".join(chunks))


@settings(max_examples=500, deadline=None)
@given(
    chunks=st.lists(small_text, max_size=8),
    stop=stops,
    include=st.booleans(),
    num_free=st.integers(0, 5),
)
def test_it_finds_what_a_search_of_the_whole_text_finds(
    chunks: list[str], stop: tuple[str, ...], include: bool, num_free: int
) -> None:
    matched, start, end = first_stop(chunks, stop, num_free)
    expected = "".join(chunks)[: end if include else start]

    checker = StopChecker(stop, include)
    shown = ""
    for index, chunk in enumerate(chunks):
        found = checker.push(chunk, may_stop=index >= num_free)
        # What was shown stays, and belongs to the result.
        assert checker.safe_text.startswith(shown)
        assert expected.startswith(checker.safe_text)
        shown = checker.safe_text
        if found:
            break
    assert (checker.matched, checker.text) == (matched, expected)
    if matched:
        assert checker.safe_text == checker.text


def test_of_several_in_one_piece_the_first_listed_counts() -> None:
    checker = StopChecker(("c", "abc", "a"))
    assert checker.push("xabc") == "c"
    assert checker.text == "xab"


@settings(max_examples=100, deadline=None)
@given(text=small_text, stop=stops)
def test_no_more_is_held_back_than_may_belong_to_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    checker = StopChecker(stop)
    if checker.push(text) is None:
        held = checker.text.removeprefix(checker.safe_text)
        assert held == "" or any(candidate.startswith(held) for candidate in stop)
        assert not any(
            candidate.startswith(text[-n:]) for candidate in stop for n in range(len(held) + 1, len(text) + 1)
        )


def test_a_stop_string_over_three_tokens() -> None:
    checker = StopChecker(("\n\nUser:",))
    assert [checker.push(part) for part in ("Hi.\n", "\nUs", "er", ": bye")] == [None, None, None, "\n\nUser:"]
    assert checker.text == "Hi."
    assert checker.push("more") == "\n\nUser:"
    assert checker.text == "Hi."


def test_a_false_start_is_shown_after_all() -> None:
    checker = StopChecker(("</s>",))
    checker.push("a </")
    assert (checker.safe_text, checker.text) == ("a ", "a </")
    checker.push("b>")
    assert (checker.safe_text, checker.text) == ("a </b>", "a </b>")


def test_with_the_stop_string_included_nothing_waits() -> None:
    checker = StopChecker(("END",), include_stop_str_in_output=True)
    checker.push("the EN")
    assert checker.safe_text == "the EN"
    assert checker.push("D of it") == "END"
    assert checker.text == "the END"
