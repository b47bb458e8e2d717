"""The suite of draft workers, over a corpus that has what its requests say."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from dovetail_corpus_ngram.drafter import CorpusNgram
from dovetail_corpus_ngram.first import CorpusFirst

from dovetail.testing import DraftWorkerSuite
from dovetail.testing.draft_rounds import RequestStep

NUMBERS = Path(__file__).with_name("numbers.jsonl")
"""In the words of the suite's tokenizer, which writes token 7 as 7."""


class TestCorpusNgram(DraftWorkerSuite):
    plugin = CorpusNgram
    options: ClassVar = {"path": NUMBERS, "min_match": 2}

    def test_the_corpus_is_used(self) -> None:
        """Otherwise the tests above would say little."""
        assert all(draft is not None and len(draft.token_ids) == 4 for draft in self.create().propose(self.batch(3)))

    @pytest.mark.parametrize(("least", "guess"), [(0.1, [4, 5, 7]), (0.4, [4, 5]), (0.8, [])])
    def test_a_guess_is_as_sure_as_the_corpus_is(self, tmp_path: Path, least: float, guess: list[int]) -> None:
        """4 follows in three places of three, 5 in two of them, and 7 in one of those."""
        (tmp_path / "corpus.jsonl").write_text("".join(f'{{"text": "1 2 3 4 {end}"}}\n' for end in ("5", "6", "5 7")))
        self.options = {"path": tmp_path / "corpus.jsonl", "min_probability": least}
        (draft,) = self.create().propose(self.batch(1, num_known=4, known=np.array([9, 1, 2, 3], dtype=np.int32)))
        assert list(draft.token_ids if draft else []) == guess
        if draft is not None:
            assert draft.confidence == [3 / 4, 2 / 4, 1 / 3][: len(guess)]


class TestCorpusFirst(DraftWorkerSuite):
    """With the suite's own drafter behind it, which is asked where the corpus does not know."""

    plugin = CorpusFirst
    options: ClassVar = {"path": NUMBERS, "then": "other", "min_match": 6}

    def test_both_are_used(self) -> None:
        """Of one batch, each for the requests that are its."""
        steps = [self.batch(1).requests[0].token_ids.tolist(), list(range(42, 30, -1))]
        batch = self.batch_of([RequestStep(i, tokens, 0, len(tokens) - 1, 4) for i, tokens in enumerate(steps)]).batch
        known, unknown = self.create().propose(batch)
        assert known is not None
        assert len(set(known.token_ids)) > 1
        assert unknown is not None
        assert list(unknown.token_ids) == [1, 1, 1, 1]
