"""Every bundled drafter that guesses rather than draws keeps the target's distribution under every bundled rule that
claims to, and a seeded request keeps its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM
from dovetail.spec_decode.suffix import corpus as corpora
from dovetail.testing.story_model import STORY

from .watched import RULES, Watched, rules, seeded

FIXED = {"num_tokens": 4, "length": "fixed"}
CHAINS: dict[str, dict[str, Any]] = {
    "ngram": {"name": "ngram", **FIXED, "min_match": 1},
    "suffix": {"name": "suffix", **FIXED, "min_match": 1},
    "suffix-corpus": {"name": "suffix", **FIXED, "max_cached_tokens": 0},
    "prediction": {"name": "prediction", **FIXED},
    "recycling-chain": {"name": "recycling", **FIXED, "tree": False},
    "medusa": {"name": "medusa", "num_tokens": 3, "length": "fixed"},
    "cascade": {"name": "cascade", **FIXED, "stages": ["prediction", "suffix-corpus", "recycling-chain"]},
}
TREES: dict[str, dict[str, Any]] = {
    "suffix-tree": {"name": "suffix", **FIXED, "min_match": 1, "max_spec_factor": 4.0, "tree": True},
    "recycling": {"name": "recycling", "num_tokens": 12, "length": "fixed"},
    "lookahead": {"name": "lookahead", "num_tokens": 13, "length": "fixed", "window": 4, "candidates": 3},
    "medusa-tree": {"name": "medusa", "num_tokens": 4, "length": "fixed", "tree": [[0], [1], [0, 0], [0, 1]]},
    "eagle-tree": {"name": "eagle", "num_tokens": 6, "length": "fixed", "top_k": 2, "depth": 3},
}


def test_every_bundled_drafter_that_does_not_draw_is_here() -> None:
    guessing = {
        entry.name
        for entry in entry_points(group="dovetail.draft_worker.v1")
        if entry.value.startswith("dovetail.") and not entry.load().capabilities.probabilities
    }
    # That of grammar drafts what a grammar forces, which it does whatever the distribution is: see test_grammar.py.
    assert guessing - {"grammar"} <= {section["name"] for section in (CHAINS | TREES).values()}


@pytest.fixture(scope="module")
def engine(drafter_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One target with all drafters."""
    folder = tmp_path_factory.mktemp("guessed")
    (folder / "stories.txt").write_text(STORY)
    paths = {name: str(drafter_paths[name]) for name in ("medusa", "eagle")}
    drafters = {
        label: section | ({"path": paths[section["name"]]} if section["name"] in paths else {})
        for label, section in (CHAINS | TREES).items()
    }
    drafters["suffix-corpus"] |= {"corpus": str(folder / "stories.txt")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "cache_directory", lambda: folder / "cache")
        with LLM(
            model={"path": str(drafter_paths["target"]), "dtype": "float32"},
            cache={"memory_gib": 0.3},
            executor={"threads": 1},
            scheduler={"max_num_seqs": 64},
            speculative={"drafters": drafters, "default": None, **rules(folder / "seen.f64")},
        ) as llm:
            yield Watched(llm, folder / "seen.f64")


@pytest.fixture(scope="module")
def plain(engine: Watched) -> list[list[int]]:
    """The tokens of the seeded requests without a drafter."""
    return engine.run("off", seeded()).token_ids


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [(drafter, "rejection") for drafter in CHAINS | TREES]
    + [pytest.param(drafter, "block", marks=() if drafter == "cascade" else pytest.mark.nightly) for drafter in CHAINS],
)
def test_guesses_keep_the_distribution_and_the_tokens_of_a_seed(
    engine: Watched, plain: list[list[int]], drafter: str, rule: str
) -> None:
    changes: dict[str, Any] = {"prediction": STORY} if drafter in ("prediction", "cascade") else {}
    run = engine.run(drafter, seeded(), acceptance=RULES[rule], **changes)
    run.assert_lossless()
    assert run.token_ids == plain
