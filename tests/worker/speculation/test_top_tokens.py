"""What drafters are told of the target's logits is what transformers computes, whatever was verified."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import DovetailError
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker.speculation.top_tokens import MOST_STEPS, RowsOfRequest, TopTokenRecords

COUNT = 3
PROMPTS = [[5, 9, 13, 5, 9, 13, 5], [40, 41, 42], [99, 3]]
READER = """
import json
import random
from pathlib import Path

from dovetail.contracts.draft_target import ReadsTopTokens
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftCapabilities


class Options(PluginOptions):
    seen: Path
    count: int = 3


class Reader(ReadsTopTokens):
    contract = (1, 1)
    Options = Options
    capabilities = DraftCapabilities(trees=True)

    @classmethod
    def num_top_tokens(cls, options):
        return options.count

    def __init__(self, options, setup):
        super().__init__(options, setup)
        self._random = random.Random(0)
        self._known = {}

    def propose(self, batch):
        drafts = []
        for request in batch.requests:
            known = request.token_ids.tolist()
            if request.top_tokens is not None:
                rows = [getattr(request.top_tokens, name).tolist() for name in ("follows", "parents", "ids")]
                before = self._known.get(request.seq_id, known[: request.num_prompt_tokens])
                with self.options.seen.open("a") as file:
                    print(json.dumps([known, len(before), *rows]), file=file)
            self._known[request.seq_id] = known
            # The target's second choice of the last row, some children of it, and tokens that stand by chance only.
            count = min(request.max_drafts, self._random.randrange(5))
            tokens = [self._random.randrange(self.setup.vocab_size) for _ in range(count)]
            drafts.append(Draft(tokens, [self._random.randrange(-1, node) for node in range(count)]))
        return drafts
"""


def rows_seen(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("blocks", [None, 7], ids=["room", "preempted"])
def test_rows_say_what_transformers_says(tmp_path: Path, blocks: int | None) -> None:
    """Every row, of rejected nodes too, with the context that its parents tell; the rows of several steps in one call
    among them."""
    (tmp_path / "reader.py").write_text(READER)
    model: Any = save_tiny_model(tmp_path / "model", tiny_config("llama"))
    seen = tmp_path / "seen.jsonl"
    reader = {"name": f"{tmp_path}/reader.py:Reader", "num_tokens": 4, "length": "fixed", "seen": str(seen)}
    with LLM(
        model={"path": str(tmp_path / "model"), "dtype": "float32", "tokenizer_mode": "none"},
        cache={"num_blocks": blocks, "block_size": 8} if blocks else {"memory_gib": 0.1},
        speculative={"drafters": {"reader": reader}},
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert all(output.metrics.drafter_error is None for output in outputs)
    assert not blocks or sum(output.metrics.num_preemptions for output in outputs)
    seen_rows = rows_seen(seen)
    assert any(len(parents) > 2 for _, _, _, parents, _ in seen_rows)
    for known, end, follows, parents, ids in seen_rows:
        assert parents[0] == -1
        if parents.count(-1) > 1:
            continue
        paths: list[list[int]] = []
        for token, parent in zip(follows, parents, strict=True):
            paths.append([*known[: end - 1], token] if parent < 0 else [*paths[parent], token])
        assert paths[0] == known[:end]
        for path, found in zip(paths, ids, strict=True):
            with torch.inference_mode():
                expected = model(torch.tensor([path])).logits[0, -1].topk(COUNT).indices.tolist()
            assert found == expected


@pytest.mark.parametrize("count", [0, 10**6])
def test_a_number_of_tokens_that_cannot_be_is_refused(tmp_path: Path, count: int) -> None:
    (tmp_path / "reader.py").write_text(READER)
    save_tiny_model(tmp_path / "model", tiny_config("llama"))
    reader = {"name": f"{tmp_path}/reader.py:Reader", "seen": str(tmp_path / "seen"), "count": count}
    with pytest.raises(DovetailError, match=r"Reader's num_top_tokens\(\) answers"):
        LLM(
            model={"path": str(tmp_path / "model"), "dtype": "float32", "tokenizer_mode": "none"},
            cache={"memory_gib": 0.1},
            speculative={"drafters": {"reader": reader}},
        )


@given(st.lists(st.lists(st.integers(-1, 2), max_size=3), min_size=1, max_size=MOST_STEPS + 8))
def test_rows_that_wait_keep_their_parents(steps: Sequence[Sequence[int]]) -> None:
    """Steps whose rows wait are handed over one behind the other, the latest of them, and no more than once."""
    records = TopTokenRecords({"one": 2, "other": 1})
    expected = []
    for number, drafted in enumerate(steps):
        parents = [-1, *(min(parent, row) + 1 for row, parent in enumerate(drafted, -1))]
        follows = np.arange(len(parents) + 1) + 10 * number
        logits = torch.eye(8)[torch.arange(len(parents) + 1) % 8]
        # Another request's row comes first.
        records.note(logits, follows, [RowsOfRequest(9, "other", 0, [-1]), RowsOfRequest(3, "one", 1, parents)])
        expected.append((follows[1:], parents))
    found = records.take(3)
    assert found is not None
    assert records.take(3) is None
    kept = expected[-MOST_STEPS:]
    assert found.follows.tolist() == [int(token) for follows, _ in kept for token in follows]
    assert found.ids.shape == (len(found.follows), 2)
    start, wanted = 0, []
    for _, parents in kept:
        wanted += [-1 if parent < 0 else start + parent for parent in parents]
        start += len(parents)
    assert found.parents.tolist() == wanted
