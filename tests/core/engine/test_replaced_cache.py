"""The KV memory of a running engine, replaced by one of another size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import CapacityError, RequestError

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
