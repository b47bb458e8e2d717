"""The drafter `grammar`: what a request's grammar forces."""

from __future__ import annotations

import numpy as np
import pytest

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import DraftBatch, DraftRequest
from dovetail.spec_decode.grammar import GrammarDrafter
from dovetail.testing.draft_suite import DraftWorkerSuite


class TestGrammarDrafter(DraftWorkerSuite):
    plugin = GrammarDrafter


@pytest.mark.parametrize(("forced", "room", "expected"), [((), 4, []), ((5, 6, 7), 4, [5, 6, 7]), ((5, 6), 0, [])])
def test_it_guesses_what_is_forced(forced: tuple[int, ...], room: int, expected: list[int]) -> None:
    worker = GrammarDrafter(PluginOptions(), TestGrammarDrafter().create().setup)
    known = np.array([1, 2], dtype=np.int32)
    request = DraftRequest(0, known, 1, room, SamplingParams(), np.array([0]), np.zeros(room), forced=forced[:room])
    [draft] = worker.propose(DraftBatch([request], None))
    assert draft is not None
    assert list(draft.token_ids) == expected
