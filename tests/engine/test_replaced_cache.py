"""The KV memory of a running engine, replaced by one of another size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import CapacityError, ConfigError, RequestError

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
NGRAM = {"drafters": {"lookup": {"name": "ngram", "num_tokens": 2, "length": "fixed"}}}


@pytest.mark.parametrize("sections", [{}, {"speculative": NGRAM}])
def test_answers_are_the_same(make_llm: Callable[..., LLM], sections: dict[str, object]) -> None:
    llm = make_llm(**sections)
    params = SamplingParams(temperature=0, max_tokens=20)

    def answers() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    before = answers()
    assert llm.engine.determine_num_available_blocks() == (400, 0)
    llm.engine.initialize_cache(90, 7)
    assert llm.engine.determine_num_available_blocks() == (90, 7)
    assert llm.engine.cache_statistics().num_blocks == 89
    assert answers() == before


def test_it_is_refused_where_it_cannot_be(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    engine = llm.engine
    with pytest.raises(CapacityError):
        engine.initialize_cache(3)
    assert engine.determine_num_available_blocks() == (400, 0)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="unfinished"):
        engine.initialize_cache(90)
    assert engine.get_num_unfinished_requests() == 1
    engine.abort_request("a")
    assert engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("given", ["x", 64.5, True, None, -1])
def test_what_is_no_number_of_blocks_is_refused(make_llm: Callable[..., LLM], given: object) -> None:
    engine = make_llm().engine
    with pytest.raises(ConfigError, match="num_device_blocks must be an integer of 0 or more, got"):
        engine.initialize_cache(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_host_blocks must be an integer of 0 or more, got"):
        engine.initialize_cache(90, given)  # type: ignore[arg-type]
    assert engine.determine_num_available_blocks() == (400, 0)


@pytest.mark.parametrize("count", [10**9, 2**70])
def test_more_blocks_than_memory_are_refused(make_llm: Callable[..., LLM], count: int) -> None:
    engine = make_llm().engine
    for given in ((count, 0), (90, count)):
        with pytest.raises(CapacityError, match=r"KV blocks .* GiB over 1 rank is more than the .* GiB of host memory"):
            engine.initialize_cache(*given)
    engine.initialize_cache(np.int64(90))  # type: ignore[arg-type]
    assert engine.determine_num_available_blocks() == (90, 0)
