"""Known deviations of a plugin from its contract, as code.

A test that cannot pass is named on the suite's subclass, with the reason and the version of the contract from which on
the reason counts no more::

    class TestMyDrafter(DraftWorkerSuite):
        plugin = MyDrafter
        quirks = {
            "test_forgets_finished_requests": Quirk(reason="the index of all texts is kept on purpose", expires="2.0"),
            "test_serves_short_requests": Quirk(reason="three tokens at least; https://example.org/9", expires="1.4"),
        }

Such a test must fail: one that passes says to delete its quirk. What fails before the test, in its fixtures, is a
failure all the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from dovetail.contracts.errors import PluginError
from dovetail.registry.entries import kind_version

_VERSION = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, kw_only=True)
class Quirk:
    """Why a test fails, and until when that is accepted.

    Raises:
        PluginError: The reason is empty, or `expires` is no version.
    """

    reason: str
    expires: str
    """The first version of the kind's contract, "major.minor", for which the quirk does not count."""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise PluginError("a quirk needs a reason: say why the plugin deviates")
        if not isinstance(self.expires, str) or _VERSION.fullmatch(self.expires) is None:
            raise PluginError(f"expires={self.expires!r} of a quirk is no version of a contract: write expires='2.0'")

    def has_expired(self, version: str) -> bool:
        """Whether the contract has reached the version at which the quirk ends."""
        return _parsed(version) >= _parsed(self.expires)


def reason_against_quirks(suite: type, quirks: Mapping[str, Any]) -> str | None:
    """Why these cannot be quirks of a suite; None where they can. Cases of a test are not looked at."""
    for name, quirk in quirks.items():
        test = _test_of(name)
        if _function(suite, test) is None:
            return f"{suite.__name__} has a quirk of {name}, and no test of that name"
        if not isinstance(quirk, Quirk):
            return f"the quirk of {name} is no Quirk but {quirk!r}: write Quirk(reason=..., expires=...)"
    return None


def expect_failures(suite: type) -> None:
    """Wraps the tests of a new subclass of a suite that its `quirks` name, so that they must fail. A name of no test is
    passed over: `reason_against_quirks` reports it when tests run."""
    quirks: Mapping[str, Quirk] = vars(suite).get("quirks") or _inherited(suite)
    wrapped = {_test_of(name) for name in _inherited(suite)}
    # In order: processes of pytest-xdist must find the tests in the same one.
    for test in dict.fromkeys(_test_of(name) for name in quirks):
        function = _function(suite, test)
        if function is not None and (test in vars(suite) or test not in wrapped):
            setattr(suite, test, _expecting_failure(function))


def quirk_of(case: str, quirks: Mapping[str, Quirk]) -> Quirk | None:
    """That of a case, "test_x[id]", or of all cases of its test."""
    return quirks.get(case) or quirks.get(_test_of(case))


def _expecting_failure(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        case = self.node.name
        quirk = quirk_of(case, self.quirks)
        if quirk is None:
            return test(self, *args, **kwargs)
        version = kind_version(self.kind)
        try:
            test(self, *args, **kwargs)
        except pytest.skip.Exception:
            raise
        except (Exception, pytest.fail.Exception) as error:
            if quirk.has_expired(version):
                error.add_note(
                    f"The quirk of {case} counts no more: it ends with contract {quirk.expires}, and this is {version}."
                )
                raise
            pytest.xfail(f"quirk until contract {quirk.expires}: {quirk.reason}")
        if not quirk.has_expired(version):
            pytest.fail(f"{case} passes: delete its quirk ({quirk.reason})", pytrace=False)

    return run


def _function(suite: type, test: str) -> Callable[..., None] | None:
    """The test of that name; None where there is none."""
    found = next((vars(base)[test] for base in suite.__mro__ if test in vars(base)), None)
    return found if test.startswith("test") and callable(found) else None


def _inherited(suite: type) -> Mapping[str, Quirk]:
    return next((vars(base)["quirks"] for base in suite.__mro__[1:] if "quirks" in vars(base)), {})


def _test_of(name: str) -> str:
    """The test's name without parameters."""
    return name.partition("[")[0]


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
