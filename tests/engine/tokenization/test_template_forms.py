"""Forms, read as Python reads them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engine.tokenization.template_forms import NO_END, Form, read_braces, read_date, read_percents


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("plain", Form(0, 0)),
        ("%d and %-5s", Form(2, 5)),
        ("%(a)7.3f%%%(b(c))12d", Form(3, 22)),
        ("100%%99999d", Form(1, 0)),
        ("%l%%99d", Form(2, 99)),
        ("%*d", Form(1, NO_END)),
        ("%" + "9" * 5000 + "d", Form(1, NO_END)),
        ("%(never closed 99d", Form(1, 0)),
    ],
)
def test_forms_of_percents(text: str, form: Form) -> None:
    assert read_percents(text) == form


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("plain {{:99}}", Form(0, 0)),
        ("{} {0!r:>5} {a:٣٠}", Form(3, 35)),
        ("{:.40f}{:%100d}", Form(2, 140)),
        ("{:{}}", Form(1, NO_END)),
        ("{0.x}", Form(1, 0, reaches=True)),
        ("{0:12}{:", Form(1, 12)),
    ],
)
def test_forms_of_braces(text: str, form: Form) -> None:
    assert read_braces(text) == form


def test_every_number_of_a_date_counts() -> None:
    assert read_date("%d %-%z40d") == Form(3, 40)


@given(st.text("%()-+ #0123456789.*hlLdsx", max_size=12))
def test_no_form_of_percents_makes_more_than_it_is_read_to(text: str) -> None:
    form = read_percents(text)
    for values in ((1,) * text.count("%"), {"": 1, "0": 1}, (), 1, "x"):
        with suppress(TypeError, ValueError, KeyError, OverflowError, MemoryError):
            if form.filled < 10**6:
                assert len(text % values) <= len(text) + form.filled + 20 * form.num_fields


@given(st.text("{}:!.0123456789<>^d", max_size=12))
def test_no_form_of_braces_makes_more_than_it_is_read_to(text: str) -> None:
    form = read_braces(text)
    if form.filled < 10**6:
        with suppress(ValueError, KeyError, IndexError, AttributeError, TypeError):
            assert len(text.format(*[1] * 10)) <= len(text) + form.filled + 20 * form.num_fields
