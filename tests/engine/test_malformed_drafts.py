"""Whatever a drafter answers or does to what it is shown, nobody's request suffers but for its own drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import LLM, SamplingParams
from dovetail.contracts.speculation import Draft, DraftBatch, DraftCapabilities, DraftWorker
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

VOCAB = 128
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8] * 3, [9, 10, 11]]


class Said(DraftWorker):
    """Answers every request with `answer`."""

    contract = (1, 0)
    capabilities = DraftCapabilities(trees=True, probabilities=True, confidence=True)
    answer: ClassVar[Any] = None

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [self.answer for _ in batch.requests]


class Chains(Said):
    capabilities = DraftCapabilities()


class Longer(Said):
    """Has an answer of its own, since what is told is told once."""


class Writes(DraftWorker):
    """Changes the user's text."""

    contract = (1, 0)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        for request in batch.requests:
            request.token_ids[:] = 3
        return [None] * len(batch.requests)


class Raises(Sequence[int]):
    """A sequence that cannot be read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("not today")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory: Path = tmp_path_factory.mktemp("malformed")
    save_tiny_model(directory, tiny_config("llama"))
    names = {"said": Said, "chains": Chains, "longer": Longer, "writes": Writes}
    drafters = {
        name: {"name": f"{__name__}:{kind.__name__}", "num_tokens": 3, "length": "fixed"}
        for name, kind in names.items()
    }
    with LLM(
        model={"path": str(directory), "tokenizer_mode": "none", "dtype": "float32"},
        cache={"block_size": 4, "num_blocks": 100},
        executor={"threads": 1},
        speculative={"drafters": drafters, "default": None, "acceptance": "rejection"},
    ) as created:
        yield created


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def beside_a_plain_request(llm: LLM, drafter: str, temperature: float = 0.0) -> list[Any]:
    drafted = replace(PARAMS, speculation=drafter, temperature=temperature, seed=1)
    return llm.generate(PROMPTS, [drafted, PARAMS], use_tqdm=False)


NUMBERS = st.one_of(
    st.integers(-2, 5),
    st.sampled_from([VOCAB, 2**40, True, 1.0, 0.5, float("nan"), None, "1", b"1", [1], np.int32(2), np.bool_(True)]),
)
WRAPPERS: list[Callable[[list[Any]], Any]] = [
    list,
    tuple,
    deque,
    iter,
    str,
    lambda values: dict(enumerate(values)),
    lambda values: frozenset(map(str, values)),
    lambda values: np.array(values, dtype=object),
    lambda values: values[0] if values else None,
    lambda values: Raises(),
]
SOUND = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
FIELDS = st.builds(lambda wrap, values: wrap(values), st.sampled_from(WRAPPERS), st.lists(NUMBERS, max_size=5))
NUMPY = SOUND.map(lambda values: np.array(values, dtype=np.int32))
TENSORS = st.builds(
    lambda rows, columns, dtype, scale: torch.full((rows, columns), scale, dtype=torch.float64).to(dtype),
    st.integers(0, 4),
    st.sampled_from([VOCAB, VOCAB, VOCAB, 1]),
    st.sampled_from([torch.float32, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from([1 / VOCAB, 0.0, -1.0, 1.0, float("nan"), float("inf")]),
)
PROBS = st.one_of(st.none(), TENSORS, TENSORS.map(lambda t: t.to("meta")), TENSORS.map(torch.Tensor.tolist), FIELDS)
DRAFTS = st.builds(
    Draft, st.one_of(SOUND, NUMPY, FIELDS), st.one_of(st.none(), FIELDS), PROBS, st.one_of(st.none(), FIELDS)
)


@given(answer=st.one_of(DRAFTS, DRAFTS, DRAFTS, FIELDS), temperature=st.sampled_from([0.0, 1.0]))
@settings(max_examples=150, deadline=None)
def test_no_draft_harms_a_request(llm: LLM, answers: list[list[int]], answer: Any, temperature: float) -> None:
    Said.answer = answer
    drafted, plain = beside_a_plain_request(llm, "said", temperature)
    assert (drafted.error, plain.error) == (None, None)
    assert plain.outputs[0].token_ids == answers[1]
    assert plain.metrics.drafter_error is None
    assert len(drafted.outputs[0].token_ids) == PARAMS.max_tokens
    if temperature == 0:
        assert drafted.outputs[0].token_ids == answers[0]
    if drafted.metrics.num_drafted == 0 and isinstance(answer, Draft):
        assert drafted.metrics.drafter_error is not None or not len(answer.token_ids)


@pytest.mark.parametrize("token_ids", [deque([5] * 8), np.array([5] * 8), range(8)], ids=["deque", "array", "range"])
def test_sequences_that_cannot_be_cut_as_lists_are_drafts(
    llm: LLM, answers: list[list[int]], token_ids: Sequence[int]
) -> None:
    Said.answer = Draft(token_ids)
    outputs = beside_a_plain_request(llm, "said")
    assert [output.outputs[0].token_ids for output in outputs] == answers
    assert outputs[0].metrics.drafter_error is None
    assert outputs[0].metrics.num_drafted > 0


def test_a_draft_that_is_longer_than_any_may_be_is_cut_and_told_once(
    llm: LLM, answers: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    Longer.answer = Draft([5] * 8)
    for _ in range(2):
        outputs = beside_a_plain_request(llm, "longer")
        assert [output.outputs[0].token_ids for output in outputs] == answers
    told = [record.getMessage() for record in caplog.records if "guesses" in record.getMessage()]
    assert told == ["drafter 'longer' (Longer) gave 8 guesses, num_tokens is 3: the rest is cut"]


def test_a_tree_of_a_drafter_that_declares_chains_is_refused(llm: LLM, answers: list[list[int]]) -> None:
    Chains.answer = Draft([5, 6], [-1, -1])
    outputs = beside_a_plain_request(llm, "chains")
    assert [output.outputs[0].token_ids for output in outputs] == answers
    assert "does not declare `trees`" in (outputs[0].metrics.drafter_error or "")


def test_a_drafter_that_writes_loses_its_requests_and_changes_no_text(llm: LLM, answers: list[list[int]]) -> None:
    outputs = beside_a_plain_request(llm, "writes")
    assert [output.outputs[0].token_ids for output in outputs] == answers
    assert "read-only" in (outputs[0].metrics.drafter_error or "")
    assert outputs[1].metrics.drafter_error is None
