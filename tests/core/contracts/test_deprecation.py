"""What is deprecated works, and each place that uses it hears once what to use."""

from __future__ import annotations

import re
import warnings

import pytest

from dovetail.contracts.deprecation import deprecated, warn_deprecated


@deprecated("acme.new", goes_in="scheduler 2.0")
def old(a: int, *, b: int = 0) -> int:
    "Adds."
    return a + b


class Setup:
    @deprecated("Setup.new", goes_in="scheduler 2.0")
    def old(self) -> Setup:
        return self

    @property
    def field(self) -> int:
        warn_deprecated("Setup.field", "Setup.other", goes_in="scheduler 2.0")
        return 3


def caught(action) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return found


def test_the_warning_says_what_to_use_and_until_when():
    text = f"{__name__}.old is deprecated: use acme.new. It goes in scheduler 2.0."
    with pytest.warns(DeprecationWarning, match=re.escape(text)):
        assert old(1, b=2) == 3


def test_the_warning_names_the_place_of_the_call():
    def call() -> None:
        old(1)

    [warning] = caught(call)
    assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno + 1)


def test_each_place_is_warned_once():
    def here() -> None:
        old(1)

    def there() -> None:
        old(1)

    assert len(caught(lambda: [here(), here(), there(), here()])) == 2


def test_methods_and_fields_are_marked_too():
    setup = Setup()
    [method] = caught(lambda: setup.old())
    assert "Setup.old is deprecated: use Setup.new" in str(method.message)
    [field] = caught(lambda: setup.field)
    assert "Setup.field is deprecated: use Setup.other" in str(field.message)
    assert method.filename == field.filename == __file__


def test_a_deprecated_function_keeps_its_name_and_docstring():
    assert (old.__name__, old.__doc__) == ("old", "Adds.")
