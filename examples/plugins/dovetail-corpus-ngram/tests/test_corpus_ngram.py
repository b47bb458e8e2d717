"""Which files are corpora, and what an engine makes of the guesses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from dovetail import LLM, RequestOutput, SamplingParams
from dovetail.contracts.errors import DovetailError
from dovetail.testing.story_model import STORY, save_story_model

PROMPTS = [STORY[: STORY.index(" One day")], STORY[: STORY.index(" The cat saw")]]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    save_story_model(directory)
    return directory


@pytest.fixture(scope="module")
def corpora(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story in every form, each in a file of its own."""
    directory = tmp_path_factory.mktemp("corpora")
    (directory / "story.txt").write_text(STORY)
    lines = [json.dumps({"text": text}) for text in ("Nothing of use.", STORY)]
    (directory / "story.jsonl").write_text("\n".join(lines) + "\n\n")
    ids = Tokenizer.from_file(str(story / "tokenizer.json")).encode(STORY).ids
    np.save(directory / "story.npy", np.array([3, 4, -1, *ids, -1], dtype=np.int64))
    return directory


def told(story: Path, *drafters: tuple[str, dict[str, Any]], **params: Any) -> Sequence[RequestOutput]:
    """What requests get with these drafters, of which the last is used."""
    with LLM(model={"path": str(story), "dtype": "float32"}, **sections(*drafters)) as llm:
        sampling = SamplingParams(**{"temperature": 0, "max_tokens": 48, **params})
        return llm.generate(PROMPTS, sampling, use_tqdm=False)


def sections(*drafters: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"speculative": {"drafters": dict(drafters), "default": drafters[-1][0]}} if drafters else {}


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def corpus(path: Path, **options: Any) -> tuple[str, dict[str, Any]]:
    return "corpus", {"name": "corpus_ngram", "path": str(path), "num_tokens": 6, "length": "fixed", **options}


@pytest.mark.parametrize("name", ["story.txt", "story.jsonl", "story.npy"])
def test_a_text_that_the_corpus_has_is_guessed(story: Path, corpora: Path, name: str) -> None:
    """Tokens are those without drafts, and nearly all drafts are right: the model tells what the corpus says."""
    outputs = told(story, corpus(corpora / name))
    assert tokens(outputs) == tokens(told(story))
    for output in outputs:
        assert output.metrics is not None
        assert output.metrics.num_accepted > 0.8 * output.metrics.num_drafted > 20


def test_sampled_tokens_are_those_without_drafts(story: Path, corpora: Path) -> None:
    """Drafts that are no draws leave a seeded request its tokens."""
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    assert tokens(told(story, corpus(corpora / "story.txt"), **sampled)) == tokens(told(story, **sampled))


def test_a_text_that_the_corpus_has_not_gets_no_draft(story: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("0123456789 " * 20)
    for output in told(story, corpus(tmp_path / "other.txt")):
        assert output.metrics is not None
        assert output.metrics.num_drafted == 0


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("missing.txt", None, r"missing\.txt is no file here; set the option `path`"),
        ("corpus.pdf", b"", r"corpus\.pdf is no corpus: name a file that ends in \.txt"),
        ("empty.txt", b"", "has no tokens"),
        ("lines.jsonl", b'{"text": "yes"}\n{"body": "no"}\n', "line 2: a document is an object with `text`"),
        ("number.jsonl", b'{"text": 7}\n', "line 1: `text` is no string"),
        ("ids.npy", b"not numpy's", "holds no token ids"),
        ("latin.txt", b"caf\xe9", "is no text in UTF-8"),
    ],
)
def test_a_corpus_that_is_none_is_refused(
    story: Path, tmp_path: Path, file: str, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DovetailError, match=reason):
        LLM(model={"path": str(story)}, **sections(corpus(tmp_path / file)))


@pytest.mark.parametrize("ids", [[5, 2**32 + 5], [5, -2]])
def test_numbers_that_are_no_ids_are_refused(story: Path, tmp_path: Path, ids: list[int]) -> None:
    np.save(tmp_path / "ids.npy", np.array(ids))
    with pytest.raises(DovetailError, match="token ids are 0 to 2"):
        LLM(model={"path": str(story)}, **sections(corpus(tmp_path / "ids.npy")))


def test_ids_of_another_model_are_refused(story: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([5, 100_000]))
    with pytest.raises(DovetailError, match="has token 100000, and the model has"):
        LLM(model={"path": str(story)}, **sections(corpus(tmp_path / "ids.npy")))


def test_a_corpus_that_is_too_large_is_refused(story: Path, corpora: Path) -> None:
    with pytest.raises(DovetailError, match=r"raise `max_tokens` \(50\)"):
        LLM(model={"path": str(story)}, **sections(corpus(corpora / "story.txt", max_tokens=50)))


@pytest.fixture(scope="module")
def in_front(story: Path, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    """A smaller model as a drafter, and the first half of the story in front of it."""
    directory = tmp_path_factory.mktemp("small")
    save_story_model(directory, num_layers=1)
    (directory / "half.txt").write_text(STORY[: STORY.index(" The cat saw")])
    every = {"num_tokens": 4, "length": "fixed"}
    small = {"name": "draft_model", "path": str(directory), **every}
    first = {"name": "corpus_first", "path": str(directory / "half.txt"), "then": "small", **every}
    return [("small", small), ("first", first)]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_another_drafter_goes_on_where_the_corpus_ends(
    story: Path, corpora: Path, in_front: list[tuple[str, dict[str, Any]]], params: dict[str, Any]
) -> None:
    """The first request is in the corpus, and goes on behind its end; the second begins there."""
    corpus_alone = corpus(Path(in_front[-1][1]["path"]), num_tokens=4)
    outputs, alone = told(story, *in_front, **params), told(story, corpus_alone, **params)
    for both, one in zip(outputs, alone, strict=True):
        assert both.metrics is not None
        assert one.metrics is not None
        assert both.metrics.drafter_error is None
        assert both.metrics.num_accepted > one.metrics.num_accepted
    if not params:
        assert tokens(outputs) == tokens(told(story))


def test_a_drafter_that_is_not_there_is_refused(story: Path, in_front: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(DovetailError, match="small"):
        LLM(model={"path": str(story)}, **sections(in_front[-1]))
