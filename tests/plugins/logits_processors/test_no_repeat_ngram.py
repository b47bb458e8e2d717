from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from dovetail.contracts.errors import RequestError
from dovetail.contracts.logits import LogitsRequest, LogitsRow, LogitsSetup
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.logits_processors.no_repeat_ngram import NoRepeatNgram, NoRepeatNgramOptions

VOCAB = 5
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def processor(size: int | None = None) -> NoRepeatNgram:
    return NoRepeatNgram(NoRepeatNgramOptions(size=size), LogitsSetup(VOCAB, (0,), None))


def request(key: int, prompt: list[int], options: int | None) -> LogitsRequest:
    return LogitsRequest(key, prompt, SamplingParams(), options)


@given(prompt=tokens.filter(bool), output=tokens, drafts=tokens, size=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_masks_what_transformers_masks(prompt: list[int], output: list[int], drafts: list[int], size: int) -> None:
    ours = processor()
    assert ours.add_request(request(1, prompt, size))
    theirs = NoRepeatNGramLogitsProcessor(size)
    for step in range(len(output) + 1):
        # Each step judges drafts as well, which do not stand.
        rows = [LogitsRow(1, output[:step] + drafts[:ahead]) for ahead in range(min(3, len(drafts)) + 1)]
        logits = torch.zeros(len(rows), VOCAB)
        ours.apply(logits, rows)
        for row, result in zip(rows, logits, strict=True):
            known = torch.tensor([prompt + list(row.output_token_ids)])
            # transformers masks nothing below n tokens, where nothing can repeat.
            expected = theirs(known, torch.zeros(1, VOCAB))[0] if known.shape[1] >= size else torch.zeros(VOCAB)
            assert torch.equal(result, expected)


def test_requests_that_say_nothing_follow_the_config() -> None:
    assert not processor().add_request(request(1, [1], None))
    assert processor(size=2).add_request(request(1, [1], None))


def test_forgets_requests() -> None:
    ours = processor()
    ours.add_request(request(1, [1, 2], 1))
    ours.remove_request(1)
    ours.add_request(request(1, [3], 1))
    logits = torch.zeros(1, VOCAB)
    ours.apply(logits, [LogitsRow(1, [])])
    assert logits[0].isinf().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("size", [0, -1, "3", True, 2.0])
def test_other_options_are_refused(size: object) -> None:
    with pytest.raises(RequestError, match="at least 1"):
        processor().validate(size)
