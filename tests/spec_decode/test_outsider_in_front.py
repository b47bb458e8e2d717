"""A drafter of another distribution in front of bundled ones with layers and states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "plugins" / "dovetail-corpus-ngram" / "src"
FIRST, ALONE = "dovetail_corpus_ngram.first:CorpusFirst", "dovetail_corpus_ngram.drafter:CorpusNgram"
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.mark.parametrize("head", ["eagle", "draft_model"])
def test_both_draft_and_the_text_stays(
    head: str, drafter_paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own option, and as the first stage of the bundled cascade."""
    monkeypatch.syspath_prepend(str(SOURCE))
    prompts = ["Once upon a time", "One day a little", "Lily liked to", "The dog. The dog"]
    fixed = {"num_tokens": 4, "length": "fixed"}
    corpus: dict[str, Any] = {"path": str(tmp_path / "corpus.txt"), "min_match": 2, **fixed}
    (tmp_path / "corpus.txt").write_text("Once upon a time")
    drafters = {
        "corpus": {"name": ALONE, **corpus},
        "head": {"name": head, "path": str(drafter_paths[head]), **fixed},
        "first": {"name": FIRST, "then": "head", **corpus},
        "cascade": {"name": "cascade", "stages": ["corpus", "head"], **fixed},
    }
    sections: dict[str, Any] = {
        "model": {"path": str(drafter_paths["target"]), "dtype": "float32"},
        "cache": {"memory_gib": 0.3},
        "executor": {"threads": 1},
    }
    with LLM(**sections) as llm:
        plain = llm.generate(prompts, PARAMS, use_tqdm=False)
    # The corpus knows what half of the requests will say.
    (tmp_path / "corpus.txt").write_text("\n".join(one.prompt + one.outputs[0].text for one in plain[:2]))
    with LLM(**sections, speculative={"drafters": drafters, "default": None}) as llm:
        for label in ("corpus", "head", "first", "cascade"):
            outputs = llm.generate(prompts, replace(PARAMS, speculation=label), use_tqdm=False)
            assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
            assert all(one.metrics is not None and one.metrics.drafter_error is None for one in outputs)
            drafted = [one.metrics.num_drafted for one in outputs if one.metrics is not None]
            assert label == "corpus" or all(drafted), "behind the corpus the other one drafts"
