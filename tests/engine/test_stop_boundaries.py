"""Stop strings beside `min_tokens`: one counts where its last character comes from a token that may end the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams

FREE = SamplingParams(temperature=0, max_tokens=24)


def expected_end(pieces: list[str], stop: str, min_tokens: int) -> tuple[int, str]:
    """Tokens and text of an output that `stop` ends, by trying every place."""
    for count in range(min_tokens + 1, len(pieces) + 1):
        old, text = "".join(pieces[: count - 1]), "".join(pieces[:count])
        for start in range(len(text)):
            if text[start : start + len(stop)] == stop and start + len(stop) > len(old):
                return count, text[:start]
    return len(pieces), "".join(pieces)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_stop_string_may_begin_before_min_tokens(
    make_text_llm: Callable[..., LLM], tiny_llama: tuple[Path, Any], drafts: bool
) -> None:
    # The target as its own draft model: every step brings four tokens, of which a stop string may end any.
    drafter = {"name": "draft_model", "path": str(tiny_llama[0]), "num_tokens": 3, "length": "fixed"}
    llm = make_text_llm(speculative={"drafters": {"it": drafter}} if drafts else None)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompt = [40, 41, 42] * 4
    tokens = llm.generate([prompt], FREE, use_tqdm=False)[0].outputs[0].token_ids
    pieces = [tokenizer.decode([token]) for token in tokens]
    asked = []
    for boundary in range(1, len(pieces)):
        start = len("".join(pieces[:boundary])) - 1
        asked += [("".join(pieces)[start : start + 2], min_tokens) for min_tokens in (0, boundary - 1, boundary)]
    params = [replace(FREE, logprobs=0, stop=stop, min_tokens=min_tokens) for stop, min_tokens in asked]
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    assert not drafts or sum(output.metrics.num_accepted for output in outputs) > len(outputs)
    for (stop, min_tokens), output in zip(asked, outputs, strict=True):
        completion = output.outputs[0]
        found = len(completion.token_ids), completion.text
        assert found == expected_end(pieces, stop, min_tokens), (stop, min_tokens)
        assert completion.logprobs is not None
        kept = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert completion.cumulative_logprob == pytest.approx(sum(kept), abs=1e-6)


def test_streams_show_no_part_of_a_stop_string_that_begins_before_min_tokens(make_text_llm: Callable[..., LLM]) -> None:
    llm = make_text_llm()
    free = llm.generate([[40, 41]], FREE, use_tqdm=False)[0].outputs[0].text
    for start in range(1, 8):
        params = replace(FREE, stop=free[start : start + 2], min_tokens=start)
        (whole,) = llm.generate([[40, 41]], params, use_tqdm=False)[0].outputs
        llm.engine.add_request("it", [40, 41], replace(params, output_kind="delta"))
        shown = ""
        while llm.engine.has_unfinished_requests():
            shown += "".join(output.outputs[0].text for output in llm.engine.step() if output.outputs)
        assert shown == whole.text
