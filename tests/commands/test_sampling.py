"""`-s` and its flags: one answer per field."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.commands.errors import exit_code
from dovetail.commands.sampling import refuse_unseen, sampling_params
from dovetail.contracts.errors import RequestError
from dovetail.contracts.sampling import SamplingParams


def read(*settings: str, **flags: Any) -> SamplingParams:
    return sampling_params(SamplingParams(top_p=0.5), list(settings), default_max_tokens=9, **flags)


def test_settings_flags_and_defaults() -> None:
    params = read("top_k=3", temperature=0.5, max_tokens=None)
    assert (params.top_k, params.temperature, params.max_tokens, params.top_p) == (3, 0.5, 9, 0.5)
    assert read("max_tokens=4", max_tokens=4).max_tokens == 4


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        (["max_tokens=3"], {"max_tokens": 5}, "given twice: --max-tokens says 5, -s says 3"),
        (["seed=1", "seed=2"], {}, "seed is given twice"),
        (["top_p={"], {}, "is not YAML"),
    ],
)
def test_bad_settings_are_usage_errors(settings: list[str], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        read(*settings, **flags)
    assert exit_code(refusal.value) == 2


def test_what_plain_text_cannot_show_is_refused() -> None:
    refuse_unseen(read())
    with pytest.raises(RequestError, match="logprobs cannot be shown as plain text"):
        refuse_unseen(read("logprobs=2"))
