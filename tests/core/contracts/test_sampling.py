"""Sampling parameters that are lists."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.contracts.sampling import SamplingParams


def test_one_text_is_one_word() -> None:
    params = SamplingParams(stop="Rome", bad_words="Paris")
    assert (params.stop, params.bad_words) == (("Rome",), ("Paris",))


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", ["12", 5])
def test_token_ids_are_a_list(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} must be a list of token ids, got {value!r}"):
        SamplingParams(**{name: value})
