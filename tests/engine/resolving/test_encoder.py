"""What the config of an encoder comes to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError
from dovetail.engine.resolving import resolve
from dovetail.registry.registry import Registry
from dovetail.testing.tiny_encoders import save_tiny_encoder

Resolve = Callable[..., ResolvedConfig]


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("encoder")
    save_tiny_encoder(directory)
    return directory


@pytest.fixture
def resolved(encoder_dir: Path, registry: Registry, cpu: Any) -> Resolve:
    def of(**keywords: Any) -> ResolvedConfig:
        model = {"path": str(encoder_dir), "tokenizer": None} | keywords.pop("model", {})
        return resolve(load_config(keywords={"model": model, **keywords}), registry, cpu)

    return of


def test_nothing_is_kept_and_prompts_are_whole(resolved: Resolve, decision: Any) -> None:
    config = resolved()
    assert (config.cache.memory_bytes, config.cache.prefix_caching) == (0, False)
    assert not config.limits.enable_chunked_prefill
    assert "it keeps no KV" in decision(config, "cache.prefix_caching").reason
    assert "computes each prompt whole" in decision(config, "scheduler.enable_chunked_prefill").reason


def test_the_attention_backend_is_one_that_sees_whole_sequences(resolved: Resolve, decision: Any) -> None:
    config = resolved()
    assert config.attention.name == "sdpa"
    answers = dict(decision(config, "attention.name").candidates)
    assert "an encoder's tokens see their whole sequence" in answers["paged_cpu"][0]
    with pytest.raises(ConfigError, match="an encoder's tokens see their whole sequence"):
        resolved(attention="paged_cpu")


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"cache": {"memory_gib": 1.0}}, "cache.memory_gib"),
        ({"cache": {"num_blocks": 8}}, "cache.num_blocks"),
        ({"cache": {"swap_gib": 1.0}}, "cache.swap_gib"),
        ({"cache": {"dtype": "float16"}}, "cache.dtype"),
        ({"speculative": {"drafters": {"lookup": {"name": "ngram"}}}}, "speculative"),
    ],
)
def test_what_only_models_that_generate_have_is_refused(resolved: Resolve, keywords: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} .* has no use: the model is an encoder.*; leave it out"):
        resolved(**keywords)


def test_a_step_that_cannot_hold_the_longest_prompt_is_refused(resolved: Resolve) -> None:
    limits = {"max_num_batched_tokens": 100, "max_num_seqs": 4}
    with pytest.raises(ConfigError, match=r"each prompt whole.*raise the first or lower the second"):
        resolved(scheduler=limits)
    assert resolved(scheduler=limits, model={"max_model_len": 100}).limits.max_num_batched_tokens == 100


@pytest.mark.parametrize(("asked", "length"), [(None, 64), (200, 200)])
def test_texts_are_as_long_as_the_model_was_trained_for(
    resolved: Resolve, encoder_dir: Path, decision: Any, asked: int | None, length: int
) -> None:
    """By the file of sentence-transformers, unless the config says otherwise."""
    file = encoder_dir / "sentence_bert_config.json"
    file.write_text('{"max_seq_length": 64, "do_lower_case": false}')
    config = resolved(model={"max_model_len": asked})
    assert config.model.max_model_len == length
    if asked is None:
        assert "max_seq_length of sentence_bert_config.json" in decision(config, "model.max_model_len").reason
    file.unlink()


def test_adapters_are_refused(resolved: Resolve) -> None:
    with pytest.raises(Exception, match="applies no adapters"):
        resolved(lora={"enabled": True})
