"""Sampling with drafts keeps the target's distribution: the whole engine against exact probabilities.

The target is a random Llama over five tokens. Its distribution of three generated tokens is computed exactly with
transformers. The first comes from the prompt's step; the second and third are the first two of the first round of
speculation, so accepted drafts, recovered and bonus tokens are all among them. Pearson's test over the 125 triples.

Sample size: `NUM_REQUESTS`. Power: `test_the_power_is_what_is_stated` computes it: a rule that moves `SHIFT` of the
probability of one second token to another is found with a probability of at least `POWER`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dovetail import LLM, SamplingParams
from dovetail.testing.acceptance_suite import SIGNIFICANCE, chi_square_p
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

NUM_REQUESTS = 4000
SHIFT = 0.05
POWER = 0.9
VOCAB = 5
PROMPT = [1, 4, 2]

PLUGINS = '''
"""Drafters that know the target's distribution after every prefix, and draw from it, from another, or beside it."""

import json
from pathlib import Path

import numpy as np
import torch

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftCapabilities, DraftWorker
from dovetail.spec_decode.rejection import RejectionRule


class Options(PluginOptions):
    table: Path
    kind: str
    parents: tuple[int, ...]
    replacement: bool = False


class Drawn(DraftWorker):
    contract = (1, 0)
    Options = Options
    capabilities = DraftCapabilities(trees=True, probabilities=True)

    def __init__(self, options, setup):
        super().__init__(options, setup)
        self._table = {tuple(prefix): np.array(p) for prefix, p in json.loads(options.table.read_text())}

    def _distribution(self, prefix):
        p = self._table[prefix]
        if self.options.kind == "agree":
            return p
        if self.options.kind == "disagree":
            return p[::-1]
        q = (p == 0).astype(float)
        return q / q.sum()

    def propose(self, batch):
        return [self._draw(request) for request in batch.requests]

    def _draw(self, request):
        generated = tuple(request.token_ids[request.num_prompt_tokens :].tolist())
        parents = self.options.parents
        if len(generated) != 1 or request.max_drafts < len(parents):
            return None
        prefixes, tokens, probs = [], [], []
        for node, parent in enumerate(parents):
            before = generated if parent < 0 else prefixes[parent]
            q = self._distribution(before).copy()
            if not self.options.replacement:
                q[[tokens[elder] for elder in range(node) if parents[elder] == parent]] = 0
            q /= q.sum()
            token = int(np.searchsorted(q.cumsum(), request.uniforms[node] * q.sum(), "right").clip(0, len(q) - 1))
            prefixes.append((*before, token))
            tokens.append(token)
            probs.append(q)
        return Draft(tokens, parents, torch.tensor(np.array(probs)).float())


class Inverted(RejectionRule):
    """The classic mistake: accepts with min(1, q / p)."""

    def accepts(self, p, q, uniform):
        return uniform * p < q
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(directory with the model and plugins.py, transformers model)."""
    directory = tmp_path_factory.mktemp("five-tokens")
    twin = save_tiny_model(directory, tiny_config("llama", vocab_size=VOCAB), seed=3)
    (directory / "plugins.py").write_text(PLUGINS)
    return directory, twin


SAMPLED = SamplingParams(temperature=1.0, ignore_eos=True)
EDITED = replace(
    SAMPLED,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=-0.2,
    logit_bias={0: 0.7, 3: -0.5},
    min_p=0.2,
)


def edited(logits: torch.Tensor, prefix: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """Logits [VOCAB] after biases and penalties, straight from their definitions."""
    logits = logits.clone()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*PROMPT, *prefix}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(prefix):
        logits[token] -= params.presence_penalty + params.frequency_penalty * list(prefix).count(token)
    return logits


def exact(twin: Any, prefixes: Sequence[Sequence[int]], params: SamplingParams) -> NDArray[np.float64]:
    """The target's distribution after the prompt and each prefix, all of one length: float64 [n, VOCAB]."""
    with torch.inference_mode():
        raw = twin(torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])).logits[:, -1].double()
    logits = torch.stack([edited(row, prefix, params) for row, prefix in zip(raw, prefixes, strict=True)])
    probs = logits.softmax(-1)
    kept = probs >= params.min_p * probs.amax(-1, keepdim=True)
    if params.top_k > 0:
        kept &= logits >= logits.topk(params.top_k).values[:, -1:]
    return torch.softmax(logits.masked_fill(~kept, -torch.inf), -1).numpy()


def table(twin: Any, params: SamplingParams) -> dict[tuple[int, ...], NDArray[np.float64]]:
    """The distribution after every prefix of up to three generated tokens."""
    found = {}
    for length in range(4):
        prefixes = list(np.ndindex(*[VOCAB] * length))
        found |= dict(zip(prefixes, exact(twin, prefixes, params), strict=True))
    return found


def expected_triples(probs: dict[tuple[int, ...], NDArray[np.float64]]) -> NDArray[np.float64]:
    """P(first, second, third), float64 [VOCAB**3]."""
    triples = [probs[()][a] * probs[(a,)][b] * probs[a, b][c] for a, b, c in np.ndindex(VOCAB, VOCAB, VOCAB)]
    return np.array(triples)


def observed_triples(
    model: Path, drafter: dict[str, Any], rule: str, params: SamplingParams
) -> tuple[NDArray[np.int64], int]:
    """How often each triple came in `NUM_REQUESTS` requests, and how many drafts were accepted."""
    with LLM(
        model={"path": str(model), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 32},
        cache={"block_size": 4, "num_blocks": 2000},
        executor={"threads": 1},
        scheduler={"max_num_seqs": 256},
        speculative={"drafters": {"drawn": drafter}, "acceptance": rule},
    ) as llm:
        outputs = llm.generate([PROMPT] * NUM_REQUESTS, params, use_tqdm=False)
    assert all(output.metrics.drafter_error is None for output in outputs)
    first = np.array([output.outputs[0].token_ids[:3] for output in outputs])
    counts = np.bincount(first @ np.array([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3)
    return counts, sum(output.metrics.num_accepted for output in outputs)


CHAIN = (-1, 0)
TREE = (-1, -1, 0, 0, 1)
# A tree has all that a chain has.
SHAPES = [pytest.param(CHAIN, id="chain", marks=pytest.mark.nightly), pytest.param(TREE, id="tree")]


def p_value(
    model: tuple[Path, Any],
    kind: str,
    parents: tuple[int, ...],
    *,
    rule: str = "rejection",
    replacement: bool = False,
    params: SamplingParams = SAMPLED,
) -> tuple[float, int]:
    directory, twin = model
    # Disjoint support needs tokens that the target cannot give.
    params = replace(params, top_k=3) if kind == "disjoint" else params
    # The round that is looked at is the last: there must be space for all its nodes, and for the token after them.
    params = replace(params, max_tokens=len(parents) + 2)
    probs = table(twin, params)
    path = directory / "table.json"
    path.write_text(json.dumps([[list(map(int, prefix)), list(p)] for prefix, p in probs.items()]))
    drafter = {"name": f"{directory}/plugins.py:Drawn", "table": str(path), "kind": kind, "parents": parents}
    drafter |= {"num_tokens": len(parents), "length": "fixed", "replacement": replacement}
    observed, accepted = observed_triples(directory, drafter, rule.format(directory), params)
    return chi_square_p(observed, expected_triples(probs) * NUM_REQUESTS), accepted


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        pytest.param("agree", CHAIN, id="agree-chain", marks=pytest.mark.nightly),
        pytest.param("agree", TREE, id="agree-tree", marks=pytest.mark.nightly),
        pytest.param("disagree", CHAIN, id="disagree-chain"),
        pytest.param("disagree", TREE, id="disagree-tree"),
        pytest.param("disjoint", CHAIN, id="disjoint-chain", marks=pytest.mark.nightly),
        pytest.param("disjoint", TREE, id="disjoint-tree"),
    ],
)
def test_triples_are_distributed_as_the_target_has_them(
    model: tuple[Path, Any], kind: str, parents: tuple[int, ...]
) -> None:
    # Of two tokens beside the target's support, siblings without replacement leave a third with nothing to draw from.
    found, accepted = p_value(model, kind, parents)
    assert found > SIGNIFICANCE
    assert accepted == 0 if kind == "disjoint" else accepted > NUM_REQUESTS / 4


def test_siblings_may_be_drawn_with_replacement(model: tuple[Path, Any]) -> None:
    found, _ = p_value(model, "disagree", TREE, replacement=True)
    assert found > SIGNIFICANCE


@pytest.mark.parametrize("parents", SHAPES)
def test_penalties_biases_and_min_p_shape_what_drawn_drafts_are_judged_by(
    model: tuple[Path, Any], parents: tuple[int, ...]
) -> None:
    support = [np.count_nonzero(p) for p in table(model[1], EDITED).values()]
    assert min(support) < VOCAB, "min_p cuts nothing"
    assert min(support) >= 2, "siblings without replacement need two tokens"
    found, accepted = p_value(model, "disagree", parents, params=EDITED)
    assert found > SIGNIFICANCE
    assert accepted > NUM_REQUESTS / 8


@pytest.mark.parametrize("parents", SHAPES)
def test_inverted_acceptance_is_found(model: tuple[Path, Any], parents: tuple[int, ...]) -> None:
    """The test above fails for a rule that accepts with min(1, q / p)."""
    found, _ = p_value(model, "disagree", parents, rule="{}/plugins.py:Inverted")
    assert found < SIGNIFICANCE / 1000


def test_the_power_is_what_is_stated(model: tuple[Path, Any]) -> None:
    """By simulation: samples of a distribution that is `SHIFT` off are told from the target's."""
    probs = table(model[1], SAMPLED)
    right = expected_triples(probs)
    second = np.einsum("a,ab->b", probs[()], np.array([probs[(a,)] for a in range(VOCAB)]))
    low, high = np.argsort(second)[[-2, -1]]
    wrong = right.reshape(VOCAB, VOCAB, VOCAB).copy()
    moved = wrong[:, high] * (SHIFT / second[high])
    wrong[:, high] -= moved
    wrong[:, low] += moved
    samples = np.random.default_rng(0).multinomial(NUM_REQUESTS, wrong.ravel(), size=300)
    found = np.mean([chi_square_p(sample, right * NUM_REQUESTS) < SIGNIFICANCE for sample in samples])
    assert found >= POWER


def test_the_significance_is_what_is_stated(model: tuple[Path, Any]) -> None:
    """By simulation: samples of the target's own distribution are refused about as often as `SIGNIFICANCE` says."""
    right = expected_triples(table(model[1], SAMPLED))
    samples = np.random.default_rng(0).multinomial(NUM_REQUESTS, right, size=2000)
    refused = np.mean([chi_square_p(sample, right * NUM_REQUESTS) < 0.05 for sample in samples])
    assert 0.03 < refused < 0.07
