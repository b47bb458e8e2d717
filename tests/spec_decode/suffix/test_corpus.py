"""A corpus on disk: what it finds, that it is indexed once, and what it refuses."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.matching import MAX_MATCHES, match_lengths
from dovetail.spec_decode.suffix import corpus as corpora
from dovetail.spec_decode.suffix.corpus import open_corpus
from dovetail.spec_decode.suffix.documents import needs_tokenizer
from dovetail.spec_decode.suffix.drafter import SuffixDrafter
from dovetail.testing.draft_suite import DraftWorkerSuite
from dovetail.testing.story_model import STORY, save_story_model

VOCAB = 50
MOST = 100_000


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A cache folder of these tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setattr(corpora, "cache_directory", lambda: folder)
        yield folder


def write(folder: Path, documents: Sequence[Sequence[int]]) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"token_ids": list(ids)}) + "\n" for ids in documents))
    return path


@given(
    documents=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=60), min_size=1, max_size=6),
    suffix=st.lists(st.integers(0, 5), min_size=2, max_size=14),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_finds_every_place_of_the_longest_match(
    documents: list[list[int]], suffix: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Few enough places: all that end in the same two tokens are found, so the longest match is among them."""
    corpus = open_corpus(write(tmp_path_factory.mktemp("documents"), documents), None, VOCAB, MOST)
    query = np.array(suffix, dtype=np.int32)
    ends = corpus.ends(query)
    expected = [
        (document, end)
        for document, ids in enumerate(documents)
        for end in range(2, len(ids) + 1)
        if ids[end - 2 : end] == suffix[-2:]
    ]
    assert len(corpus) == sum(map(len, documents))
    assert len(expected) <= MAX_MATCHES
    starts = np.cumsum([corpora.PAD, *(len(ids) + 1 for ids in documents)])
    assert ends.tolist() == [int(starts[document]) + end for document, end in expected]
    # A match never reaches over the beginning of a document.
    lengths = match_lengths(corpus.text, ends, query)
    for length, (document, end) in zip(lengths.tolist(), expected, strict=True):
        ids = documents[document][:end]
        common = next((n for n in range(min(end, len(suffix)), 0, -1) if ids[-n:] == suffix[-n:]), 0)
        assert length == common


def test_of_very_many_places_those_that_agree_most_are_found(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 2, 20_000)
    needle = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0], dtype=np.int32)
    ids[12_345 : 12_345 + len(needle)] = needle
    corpus = open_corpus(write(tmp_path, [ids.tolist()]), None, VOCAB, MOST)
    ends = corpus.ends(needle)
    assert 1 <= len(ends) <= MAX_MATCHES
    assert int(match_lengths(corpus.text, ends, needle).max()) == len(needle)


def test_a_content_is_indexed_once_and_a_broken_index_again(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path, [[1, 2, 3, 4], [3, 4, 5]])
    query = np.array([3, 4], dtype=np.int32)
    before = set((cache / "corpora").iterdir()) if (cache / "corpora").exists() else set()
    first = open_corpus(path, None, VOCAB, MOST).ends(query).tolist()
    (folder,) = set((cache / "corpora").iterdir()) - before
    stamps = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    assert open_corpus(copy, None, VOCAB, MOST).ends(query).tolist() == first
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == stamps, "equal content, one index"
    (folder / "places.npy").write_bytes((folder / "places.npy").read_bytes()[:-5])
    assert open_corpus(path, None, VOCAB, MOST).ends(query).tolist() == first
    write(tmp_path, [[3, 4]])
    assert len(open_corpus(path, None, VOCAB, MOST)) == 2, "another content"


def test_a_folder_holds_texts_lines_and_arrays(tmp_path: Path) -> None:
    save_story_model(tmp_path / "model", num_layers=1)
    tokenizer = (tmp_path / "model" / "tokenizer.json").read_text()
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("Lily saw a cat.\n" * 9000)
    (folder / "b.jsonl").write_text('"Lily"\n\n[4, 5, 6]\n{"text": "The cat"}\n')
    np.save(folder / "inner" / "c.npy", np.array([7, 8, 9]))
    (folder / "README").write_text("is no document")
    corpus = open_corpus(folder, tokenizer, 400, 10 * MOST)
    for ids in ([4, 5], [7, 8]):
        (end,) = corpus.ends(np.array(ids, dtype=np.int32))
        assert int(corpus.text[end]) == ids[-1] + 1


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{", "a.jsonl", "a.jsonl cannot be read"),
        ('{"words": 3}', "a.jsonl", "a.jsonl, line 1: expected a text"),
        ("[1, 2]\n[1, 50]", "a.jsonl", "line 2: token ids must be at least 0 and below 50"),
        ("[[1], [2]]", "a.jsonl", "a flat list of integers"),
        ("text", "a.txt", "the model has no tokenizer: give token ids"),
        ("", "a.jsonl", "holds no token"),
        ("text", "a.pdf", "is no file of kind .txt"),
        ("[1, 2, 3, 4, 5, 6, 7, 8, 9]", "a.jsonl", "more than 8 tokens .max_corpus_tokens"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path: Path, content: str, name: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_corpus(tmp_path / name, None, VOCAB, 8)


class TestSuffixOverACorpus(DraftWorkerSuite):
    plugin = SuffixDrafter

    @pytest.fixture(autouse=True)
    def over_a_corpus(self, tmp_path: Path) -> None:
        path = write(tmp_path, [np.random.default_rng(0).integers(0, VOCAB, 500).tolist()])
        type(self).options = {"corpus": str(path), "max_cached_tokens": 0}


def test_a_corpus_speeds_up_what_it_holds_and_changes_nothing(tmp_path: Path) -> None:
    save_story_model(tmp_path / "model")
    (tmp_path / "stories.txt").write_text(STORY)
    fixed = {"name": "suffix", "num_tokens": 6, "length": "fixed", "max_cached_tokens": 0}
    drafters = {"corpus": {**fixed, "corpus": str(tmp_path / "stories.txt")}, "alone": fixed}
    params = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    with LLM(
        model={"path": str(tmp_path / "model"), "dtype": "float32"},
        cache={"num_blocks": 64},
        speculative={"drafters": drafters, "default": None},
    ) as llm:
        outputs = {
            name: llm.generate("Once upon a time", SamplingParams(**params, speculation=name), use_tqdm=False)[0]
            for name in ("off", "alone", "corpus")
        }
    assert len({tuple(output.outputs[0].token_ids) for output in outputs.values()}) == 1
    accepted = {name: output.metrics.num_accepted for name, output in outputs.items()}
    assert accepted["corpus"] > 30 > accepted["alone"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["[1, 2]", '{"token_ids": [3]}', '{"text": "a", "token_ids": [3]}'], False),
        (['{"name": "a", "token_ids": [1]}', "", "{", '{"words": 3}'], False),
        (["[1, 2]", '"a text"'], True),
        (['{"token_ids": [1]}', '  {"text": "a text"}'], True),
        (['{"text": "the key \\"token_ids\\"", "of": {"token_ids": 1}}'], True),
    ],
)
def test_lines_hold_text_where_one_of_them_does(tmp_path: Path, lines: list[str], expected: bool) -> None:
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    assert needs_tokenizer([tmp_path / "corpus.jsonl"]) == expected


def test_an_index_that_the_disk_does_not_take_leaves_no_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(cache.rglob("*"))

    def fill(file: IO[bytes], array: Any) -> None:
        file.write(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(corpora, "_save", fill)
    with pytest.raises(OSError, match="No space left"):
        open_corpus(write(tmp_path, [[9, 8, 7, 6]]), None, VOCAB, MOST)
    assert not [path for path in set(cache.rglob("*")) - before if path.is_file()]


def test_text_without_a_tokenizer_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_story_model(tmp_path / "model", num_layers=1)
    (tmp_path / "stories.txt").write_text(STORY)
    drafter = {"name": "suffix", "corpus": str(tmp_path / "stories.txt")}
    model = {"path": str(tmp_path / "model"), "tokenizer_mode": "none"}
    with pytest.raises(ConfigError, match="holds text, and there is no tokenizer"):
        LLM(model=model, speculative={"drafters": {"suffix": drafter}})
