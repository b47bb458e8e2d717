"""A tiny random Llama and its Hugging Face twin, and a small model that writes text, for engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dovetail import LLM, LLMEngine
from dovetail.testing.story_model import save_story_model
from dovetail.testing.tiny_models import save_tiny_model, tiny_config


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(directory, transformers model): 2 layers, vocabulary of 128, no tokenizer."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    model = save_tiny_model(directory, tiny_config("llama", max_position_embeddings=512))
    return directory, model


@pytest.fixture
def make_llm(tiny_llama: tuple[Path, Any]) -> Iterator[Callable[..., LLM]]:
    """`LLM` over the tiny Llama in float32; sections given as keywords are merged over small defaults.

    After the test, every engine that is idle must hold no KV block.
    """
    created: list[LLM] = []

    def make(**sections: Any) -> LLM:
        defaults: dict[str, dict[str, Any]] = {
            "model": {"path": str(tiny_llama[0]), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 256},
            "cache": {"block_size": 4, "num_blocks": 400},
            "executor": {"threads": 1},
        }
        merged: dict[str, Any] = dict(defaults)
        for name, section in sections.items():
            merged[name] = defaults.get(name, {}) | section if isinstance(section, dict) else section
        llm = LLM(**merged)
        created.append(llm)
        return llm

    yield make
    for llm in created:
        if not llm.engine.request_ids:
            check_nothing_is_held(llm.engine)
        llm.shutdown()


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tokenizer for the tiny Llama: printable ASCII, newline, and words of two and three letters."""
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    words = ["".join(word) for word in zip("aeioustnr" * 4, "ntrslaeio" * 4, ["", "a", "e", "s"] * 9, strict=True)]
    vocabulary = [*letters, "\u0120", "\u010a", *dict.fromkeys(words)][:128]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory = tmp_path_factory.mktemp("tiny-tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


@pytest.fixture
def make_text_llm(make_llm: Callable[..., LLM], tiny_tokenizer: str) -> Callable[..., LLM]:
    """As `make_llm`, with a tokenizer."""

    def make(**sections: Any) -> LLM:
        model = {"tokenizer": tiny_tokenizer, "tokenizer_mode": "auto"} | sections.pop("model", {})
        return make_llm(model=model, **sections)

    return make


@pytest.fixture(scope="session")
def story_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model that writes English, and its tokenizer."""
    directory = tmp_path_factory.mktemp("story-model")
    save_story_model(directory)
    return directory


@pytest.fixture
def make_stories(make_llm: Callable[..., LLM], story_model: Path) -> Callable[..., LLM]:
    """As `make_llm`, over a model with a tokenizer that knows a story by heart."""

    def make(**sections: Any) -> LLM:
        model = {"path": str(story_model), "tokenizer_mode": "auto"} | sections.pop("model", {})
        return make_llm(model=model, **sections)

    return make


def check_nothing_is_held(engine: LLMEngine) -> None:
    """No request, no sequence, no block."""
    assert not engine.has_unfinished_requests()
    assert (engine.core.num_running, engine.core.num_waiting) == (0, 0)
    core = engine.core
    kept = [core._live, core._on_worker, core._reached_worker, core._awaiting_first, core._bad_words, core._flights]
    siblings = core._siblings
    assert not any([*kept, siblings._parked, siblings._pending_forks, siblings._retained])
    if core._cohorts is not None:
        assert not any([core._cohorts._members, core._cohorts.tokens._num_sent, core._cohorts.tokens._drafts])
    statistics = engine.cache_statistics()
    assert (statistics.num_used_blocks, statistics.num_used_host_blocks) == (0, 0)


@pytest.fixture(name="check_nothing_is_held")
def _check_nothing_is_held() -> Callable[[LLMEngine], None]:
    return check_nothing_is_held


@pytest.fixture(scope="session")
def hf_greedy(tiny_llama: tuple[Path, Any]) -> Callable[[list[int], int], list[int]]:
    """The tokens that transformers' `generate` gives, greedy."""
    import torch

    model = tiny_llama[1]
    cache: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        key = (tuple(prompt), num_tokens)
        if key not in cache:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
            cache[key] = out[0, len(prompt) :].tolist()
        return cache[key]

    return generate


@pytest.fixture(scope="session")
def hf_log_probs(tiny_llama: tuple[Path, Any]) -> Callable[[list[int]], Any]:
    """float32 [len(ids), vocab_size]: log probabilities of the token after each position, by transformers."""
    import torch

    def log_probs(ids: list[int]) -> Any:
        with torch.no_grad():
            return tiny_llama[1](torch.tensor([ids])).logits[0].float().log_softmax(-1)

    return log_probs
