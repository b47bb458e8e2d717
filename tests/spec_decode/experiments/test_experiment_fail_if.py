"""The condition of `--fail-if`."""

from __future__ import annotations

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.fail_if import Condition
from dovetail.spec_decode.experiments.results import Row, result_names

VALUES = {
    "lossless": True,
    "speedup": 1.2,
    "speedup.low": 0.98,
    "speedup.verdict": "faster",
    "ttft.low": None,
    "batch": 4,
    "length": None,
}
UNMEASURED = {"ttft.low": "3 groups, 5 needed"}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("lossless == false or speedup.low < 1.0", True),
        ("speedup_ok", None),
        ("not lossless", False),
        ("lossless", True),
        ("speedup.low<1.0 and not lossless", False),
        ("(speedup > 1 or lossless) and batch >= 4", True),
        ("speedup.verdict == 'slower'", False),
        ('speedup.verdict != "slower" and speedup > -1e0', True),
        ("not (batch == 4 or batch == 8)", False),
        ("lossless == true and speedup.low >= .98", True),
        ("false or false and true", False),
        ("ttft.low < 0.5", True),
        ("ttft.low == none", True),
        ("ttft.low != none", False),
        ("not ttft.low < 0.5", True),
        ("not (ttft.low >= 0.5)", True),
        ("ttft.low == 0.5", True),
        ("ttft.low < 0.5 and batch == 1", False),
        ("not (ttft.low < 0.5 or batch == 4)", False),
        ("length == 4", False),
        ("length == none", True),
    ],
)
def test_conditions(text: str, holds: bool | None) -> None:
    condition = Condition(text)
    if holds is None:
        with pytest.raises(ConfigError, match="no result 'speedup_ok'; did you mean"):
            condition.failures([Row("x", VALUES, UNMEASURED)])
        return
    assert bool(condition.failures([Row("x", VALUES, UNMEASURED)])) == holds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speedup <", "breaks off"),
        ("", "breaks off"),
        ("(lossless", "closing parenthesis"),
        ("lossless speedup", "one thing too many"),
        ("speedup.low < 1; exit", "';' means nothing"),
        ("__import__('os').system('true')", "means nothing"),
        ("and lossless", "missing before 'and'"),
        ("1 < speedup < 2", "one thing too many"),
    ],
)
def test_what_is_no_condition_is_told(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--fail-if") as error:
        Condition(text)
    assert words in str(error.value)


def test_text_and_number_have_no_order() -> None:
    with pytest.raises(ConfigError, match="compares a text with a number"):
        Condition("speedup.verdict < 1").failures([Row("x", VALUES, UNMEASURED)])


def test_failures_say_what_was_found() -> None:
    failure = Condition("speedup.low < 1.0").failures([Row("lookup@4, batch 1", VALUES, UNMEASURED)])[0]
    assert failure.label == "lookup@4, batch 1"
    assert failure.values == {"speedup.low": 0.98}
    assert failure.message == "lookup@4, batch 1: speedup.low = 0.98"


def test_the_names_that_the_docs_promise_exist() -> None:
    promised = {
        "lossless",
        "speedup",
        "speedup.low",
        "speedup.verdict",
        "ttft.low",
        "itl.high",
        "e2e",
        "throughput.low",
    }
    promised |= {
        "ran",
        "drafter_error",
        "acceptance.rate",
        "acceptance.rate_of_requests",
        "acceptance.length.low",
        "diverged.real",
        "batch",
    }
    assert promised <= set(result_names())
