"""Pages of latent vectors through the whole engine: greedy tokens are those of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.outputs import RequestOutput
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("deepseek_v3")
    return directory, save_tiny_model(directory, tiny_config("deepseek_v3"))


def sections(directory: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(directory), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 128},
        "cache": {"block_size": 4, "num_blocks": 400},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
        "executor": {"threads": 1},
    } | more


def prompts(count: int = 8) -> list[list[int]]:
    draw = random.Random(3)
    shared = [draw.randrange(3, 128) for _ in range(20)]
    return [shared[: 20 * (index % 2)] + [draw.randrange(3, 128) for _ in range(9 + index)] for index in range(count)]


def expected(hf: Any, asked: Sequence[list[int]]) -> list[list[int]]:
    tokens = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = hf.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("swap_gib", [0.0, 0.01])
def test_preempted_requests_go_on_with_the_vectors_that_they_had(model: tuple[Path, Any], swap_gib: float) -> None:
    directory, hf = model
    cache = {"block_size": 4, "num_blocks": 34, "swap_gib": swap_gib}
    with LLM(**sections(directory, cache=cache)) as llm:
        outputs = llm.generate(prompts(), PARAMS)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert (llm.engine.cache_statistics().num_swapped_out_blocks > 0) == (swap_gib > 0)
    assert tokens_of(outputs) == expected(hf, prompts())


@pytest.mark.parametrize(
    "drafter",
    [
        {"name": "ngram", "min_match": 1, "num_tokens": 3},
        {"name": "suffix", "num_tokens": 6, "max_spec_factor": 4.0, "tree": True},
        {"name": "draft_model", "num_tokens": 3},
    ],
    ids=["chains", "trees", "a drafter with latent pages"],
)
def test_drafts_are_verified_over_latent_pages(model: tuple[Path, Any], drafter: dict[str, Any]) -> None:
    """The draft model is the target itself, so that each of its drafts is accepted if its own pages are right."""
    directory, hf = model
    path = {"path": str(directory)} if drafter["name"] == "draft_model" else {}
    speculative = {"drafters": {"it": {"length": "fixed", **drafter, **path}}}
    with LLM(**sections(directory, speculative=speculative)) as llm:
        llm.generate(prompts(), PARAMS)
        outputs = llm.generate(prompts(), PARAMS)
    assert tokens_of(outputs) == expected(hf, prompts())
    drafted = sum(output.metrics.num_drafted for output in outputs)
    accepted = sum(output.metrics.num_accepted for output in outputs)
    assert 0 < accepted <= drafted
    assert (accepted == drafted) == (drafter["name"] == "draft_model")


def test_two_ranks_keep_the_same_vectors_and_share_cached_prefixes(model: tuple[Path, Any]) -> None:
    directory, hf = model
    with LLM(**sections(directory, executor={"tensor_parallel": 2, "threads": 1})) as llm:
        assert llm.engine.config.executor.name == "multiproc"
        llm.generate(prompts(), PARAMS)
        outputs = llm.generate(prompts(), PARAMS)
    assert tokens_of(outputs) == expected(hf, prompts())
    assert all(output.num_cached_tokens > 0 for output in outputs)


def test_quantized_pages_are_refused_with_what_to_set(model: tuple[Path, Any]) -> None:
    cache = {"block_size": 4, "num_blocks": 40, "dtype": "int8"}
    with pytest.raises(ConfigError, match="latent vectors cannot be int8 yet; set cache\\.dtype"):
        LLM(**sections(model[0], cache=cache))


def test_explain_counts_one_vector_per_token_and_layer(model: tuple[Path, Any]) -> None:
    """24 + 8 elements in two layers, where keys and values of four heads of 20 and 10 elements would be 240."""
    from dovetail.config.load import load_config
    from dovetail.engine.resolving.rules import resolve
    from dovetail.worker.estimate import estimate_memory
    from dovetail.worker.machine.environment import detect_environment

    resolved = resolve(load_config(sections(model[0])))
    assert (resolved.model_family.name, resolved.cache.num_blocks) == ("deepseek", 400)
    estimate = estimate_memory(resolved, detect_environment(None))
    assert estimate.kv_bytes_per_token == 2 * (24 + 8) * 4
    assert estimate.kv_bytes == 400 * 4 * estimate.kv_bytes_per_token
