"""Grammar specs: what can be, and by which name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar_spec import STRUCTURAL_TAG, GrammarSpec, GrammarTag

DIGITS = GrammarSpec(form="regex", source="[0-9]+")
TAG = GrammarTag(begin="<n>", content=DIGITS, end="</n>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"form": ""}, "needs a form"),
        ({"form": "json_schema", "max_whitespace": -1}, "0 or more"),
        ({"form": "regex", "tags": (TAG,)}, "has no tags"),
        ({"form": "regex", "at_least_one": True}, "has no tags"),
        ({"form": STRUCTURAL_TAG}, "at least one tag"),
        ({"form": STRUCTURAL_TAG, "tags": (TAG,), "triggers": ("",)}, "not empty"),
        ({"form": STRUCTURAL_TAG, "tags": (TAG,), "triggers": ("<m",)}, "none of the triggers"),
        ({"form": STRUCTURAL_TAG, "tags": (TAG,), "triggers": ("<n",), "source": "x"}, "its own source"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GrammarSpec(**fields)


def test_tags_are_not_nested() -> None:
    outer = GrammarSpec(form=STRUCTURAL_TAG, tags=(TAG,), triggers=("<n",))
    with pytest.raises(RequestError, match="nested"):
        GrammarSpec(form=STRUCTURAL_TAG, tags=(GrammarTag(begin="<n", content=outer, end=""),), triggers=("<n",))


def test_forms_are_those_inside_of_tags_too() -> None:
    assert GrammarSpec(form=STRUCTURAL_TAG, tags=(TAG,), triggers=("<n",)).forms == {STRUCTURAL_TAG, "regex"}


def test_equal_specs_have_one_name_that_travels() -> None:
    again = pickle.loads(pickle.dumps(DIGITS))
    assert (again, again.name, hash(again)) == (DIGITS, DIGITS.name, hash(DIGITS))
    others = {GrammarSpec(form="regex", source="[0-9]*").name, GrammarSpec(form="lark", source="[0-9]+").name}
    assert len(others | {DIGITS.name}) == 3
    assert DIGITS.name == "c3dff244bc739ad6ae1943e858f592d266bbe808a819ebdec9e9865d6df4f113"
