"""Stop strings must not depend on how the text arrives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.tokenization import StopChecker

small_text = st.text("ab\n", max_size=20)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def first_stop(text: str, stop: tuple[str, ...]) -> tuple[str | None, int]:
    """The stop string that is complete first (the longest of those), and where it ends: one character at a time."""
    for end in range(1, len(text) + 1):
        ending = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if ending:
            return max(ending, key=len), end
    return None, len(text)


@settings(max_examples=300, deadline=None)
@given(chunks=st.lists(small_text, max_size=8), stop=stops, include=st.booleans())
def test_any_cut_gives_what_one_character_at_a_time_gives(
    chunks: list[str], stop: tuple[str, ...], include: bool
) -> None:
    text = "".join(chunks)
    matched, end = first_stop(text, stop)
    expected = text[:end] if include or matched is None else text[: end - len(matched)]

    checker = StopChecker(stop, include)
    shown = ""
    for chunk in chunks:
        found = checker.push(chunk)
        # What was shown stays, and belongs to the result.
        assert checker.safe_text.startswith(shown)
        assert expected.startswith(checker.safe_text)
        shown = checker.safe_text
        if found:
            break
    assert (checker.matched, checker.text) == (matched, expected)
    if matched:
        assert checker.safe_text == checker.text


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
