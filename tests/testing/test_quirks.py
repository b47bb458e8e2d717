"""Quirks: deviations that a plugin's author knows."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.testing import Quirk, run_test
from dovetail.testing.suite import Suite

REASON = "it counts from one, as its callers do"


class Sizes:
    small = 1
    large = 7


class SizesSuite(Suite):
    kind: ClassVar[str] = "hooks"
    plugin: ClassVar[Any] = Sizes

    def test_is_small(self) -> None:
        assert self.plugin.small < 3

    def test_is_odd_in_vain(self) -> None:
        assert self.plugin.small % 2 == 0

    @pytest.mark.parametrize("name", ["small", "large"])
    def test_fits(self, name: str) -> None:
        assert vars(self.plugin)[name] < 3

    def test_skips(self) -> None:
        pytest.skip("not here")


def quirk(expires: str = "2.0") -> Quirk:
    return Quirk(reason=REASON, expires=expires)


def test_a_quirk_of_a_test_that_fails_is_reported_by_name() -> None:
    outcome = run_test(SizesSuite, "test_is_odd_in_vain", quirks={"test_is_odd_in_vain": quirk()})
    assert outcome.quirks == {"test_is_odd_in_vain": f"quirk until contract 2.0: {REASON}"}
    assert not outcome.failed


def test_a_quirk_of_a_test_that_passes_is_a_failure_that_says_what_to_do() -> None:
    outcome = run_test(SizesSuite, "test_is_small", quirks={"test_is_small": quirk()})
    assert f"test_is_small passes: delete its quirk ({REASON})" in outcome.failed["test_is_small"]


def test_a_quirk_may_be_of_one_case() -> None:
    quirks = {"test_fits[large]": quirk()}
    assert list(run_test(SizesSuite, "test_fits[large]", quirks=quirks).quirks) == ["test_fits[large]"]
    assert run_test(SizesSuite, "test_fits[small]", quirks=quirks).passed == ["test_fits[small]"]
    of_all = run_test(SizesSuite, "test_fits[small]", quirks={"test_fits": quirk()})
    assert "test_fits[small] passes" in of_all.failed["test_fits[small]"]


def test_a_quirk_ends_with_the_version_that_it_names() -> None:
    expired = {"test_is_odd_in_vain": quirk("1.0")}
    outcome = run_test(SizesSuite, "test_is_odd_in_vain", quirks=expired)
    assert "counts no more: it ends with contract 1.0, and this is 1." in outcome.failed["test_is_odd_in_vain"]
    assert run_test(SizesSuite, "test_is_small", quirks={"test_is_small": quirk("1.0")}).passed


def test_versions_are_compared_as_numbers() -> None:
    assert quirk("1.9").has_expired("1.10")
    assert not quirk("1.10").has_expired("1.9")


def test_a_subclass_may_have_other_quirks_than_its_base() -> None:
    class Base(SizesSuite):
        quirks: ClassVar[dict[str, Quirk]] = {"test_is_odd_in_vain": quirk()}

    assert run_test(Base, "test_is_odd_in_vain").quirks
    more = {**Base.quirks, "test_is_small": quirk()}
    assert run_test(Base, "test_is_odd_in_vain", quirks=more).quirks
    assert run_test(Base, "test_is_small", quirks=more).failed
    assert run_test(Base, "test_is_odd_in_vain", quirks={"test_is_small": quirk()}).failed


def test_what_is_skipped_stays_skipped() -> None:
    assert run_test(SizesSuite, "test_skips", quirks={"test_skips": quirk()}).skipped


@pytest.mark.parametrize("name", ["test_is_smal", "plugin", "kind", "test_fits_not[small]"])
def test_a_quirk_of_no_test_is_an_error(name: str) -> None:
    outcome = run_test(SizesSuite, "test_is_small", quirks={name: quirk()})
    assert f"has a quirk of {name}, and no test of that name" in outcome.failed["test_is_small"]


def test_a_quirk_of_no_case_is_a_failure() -> None:
    outcome = run_test(SizesSuite, "test_is_small", quirks={"test_fits[huge]": quirk()})
    assert "there is a quirk of test_fits[huge], and no such case" in outcome.failed["test_is_small"]


@pytest.mark.parametrize("fields", [{"reason": " ", "expires": "2.0"}, {"reason": REASON, "expires": "never"}])
def test_reason_and_version_must_say_something(fields: dict[str, str]) -> None:
    with pytest.raises(PluginError, match=r"needs a reason|write expires='2\.0'"):
        Quirk(**fields)


@pytest.mark.parametrize("fields", [{"reason": REASON}, {"expires": "2.0"}])
def test_reason_and_version_are_both_needed(fields: dict[str, str]) -> None:
    with pytest.raises(TypeError):
        Quirk(**fields)


def test_a_text_is_no_quirk() -> None:
    outcome = run_test(SizesSuite, "test_is_small", quirks={"test_is_small": "slow"})
    assert "is no Quirk but 'slow'" in outcome.failed["test_is_small"]
