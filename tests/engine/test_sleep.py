"""Sleeping: what was loaded is what wakes up, and what a sleeping engine is asked is answered in words."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, BeamSearchParams, SamplingParams
from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.contracts.pausing import EngineConflict
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def llm(make_llm: Callable[..., LLM], tmp_path: Path) -> LLM:
    save_tiny_model(tmp_path / "model", tiny_config("llama"), seed=1)
    return make_llm(model={"path": str(tmp_path / "model"), "operators": None})


def tokens(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_another_checkpoint_is_taken_only_where_that_is_asked_for(llm: LLM, tmp_path: Path) -> None:
    before = tokens(llm)
    llm.engine.sleep(2)
    other = save_tiny_model(tmp_path / "model", tiny_config("llama"), seed=2)
    with pytest.raises(ModelError, match=r"model\.safetensors changed meanwhile.*wake_up\(new_weights=True\)"):
        llm.engine.wake_up()
    with pytest.raises(RequestError, match="the engine sleeps"):
        tokens(llm)
    llm.engine.wake_up(new_weights=True)
    assert tokens(llm) == greedy_by_hf(other) != before
    llm.engine.sleep(2)
    llm.engine.wake_up()  # the new ones are what is loaded now
    assert tokens(llm) == greedy_by_hf(other)


def test_outputs_name_the_version_of_the_weights(llm: LLM) -> None:
    def versions() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=3, output_kind="delta")
        llm.engine.add_request("a", PROMPT, params)
        found = []
        while llm.engine.has_unfinished_requests():
            found += [output.weight_version for output in llm.engine.step()]
        return found

    assert versions() == [0, 0, 0]
    for level, new_weights, version in [(1, False, 0), (2, True, 1), (2, False, 1), (2, True, 2)]:
        llm.engine.sleep(level)
        llm.engine.wake_up(new_weights=new_weights)
        assert versions() == [version] * 3


QUANTIZED = {"q8": "float32", "q4": "float32", "int8": "bfloat16", "fp8": "float32", "w8a8": "float32"}


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_read_again(make_llm: Callable[..., LLM], tmp_path: Path, method: str) -> None:
    """After level 2, old ones and new ones: what an engine says that starts with them."""
    path, other = tmp_path / "model", tmp_path / "other"
    for directory, seed in ((path, 1), (other, 2)):
        save_tiny_model(directory, tiny_config("llama"), seed=seed)
    section = {"quantization": method, "dtype": QUANTIZED[method], "packed_cache_gib": 0}
    llm = make_llm(model={"path": str(path), **section})
    before = tokens(llm)
    llm.engine.sleep(2)
    llm.engine.wake_up()
    assert tokens(llm) == before
    llm.engine.sleep(2)
    (other / "model.safetensors").replace(path / "model.safetensors")
    llm.engine.wake_up(new_weights=True)
    assert tokens(llm) == tokens(make_llm(model={"path": str(path), **section})) != before


def test_batch_invariant_weights_are_read_again(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(reproducibility="strict")
    before = tokens(llm)
    assert llm.engine.sleep(2) > 100_000
    llm.engine.wake_up()
    assert tokens(llm) == before


def test_weights_that_were_kept_on_disk_stay_those_of_their_checkpoint(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that starts with kept weights wakes up with others: neither it nor a later start mixes them up."""
    monkeypatch.setattr("dovetail.worker.loaded_model.default_directory", lambda: tmp_path / "kept")
    path, other = tmp_path / "model", tmp_path / "other"
    for directory, seed in ((path, 1), (other, 2)):
        save_tiny_model(directory, tiny_config("llama"), seed=seed)
    section = {"path": str(path), "quantization": "q8"}
    before = tokens(make_llm(model=section))
    (file,) = (tmp_path / "kept").glob("*.safetensors")
    kept = file.read_bytes()
    llm = make_llm(model=section)
    assert tokens(llm) == before
    llm.engine.sleep(2)
    (path / "model.safetensors").rename(tmp_path / "first")
    (other / "model.safetensors").rename(path / "model.safetensors")
    llm.engine.wake_up(new_weights=True)
    after = tokens(llm)
    assert after != before
    assert file.read_bytes() == kept
    assert tokens(make_llm(model=section)) == after
    (path / "model.safetensors").unlink()
    (tmp_path / "first").rename(path / "model.safetensors")
    assert tokens(make_llm(model=section)) == before


def test_one_that_was_put_back_is_taken(llm: LLM, tmp_path: Path) -> None:
    before = tokens(llm)
    file = tmp_path / "model" / "model.safetensors"
    stat = file.stat()
    llm.engine.sleep(2)
    file.rename(tmp_path / "kept")
    with pytest.raises(ModelError):
        llm.engine.wake_up()
    (tmp_path / "kept").rename(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    llm.engine.wake_up()
    assert tokens(llm) == before


def test_weights_in_host_memory_need_no_checkpoint(llm: LLM, tmp_path: Path) -> None:
    before = tokens(llm)
    llm.engine.sleep(1)
    save_tiny_model(tmp_path / "model", tiny_config("llama"), seed=2)
    llm.engine.wake_up()
    assert tokens(llm) == before


def test_whatever_a_sleeping_engine_is_asked(llm: LLM) -> None:
    before = tokens(llm)
    llm.engine.sleep()
    for call in (
        lambda: llm.generate([PROMPT], GREEDY),
        lambda: llm.engine.add_request("a", PROMPT, GREEDY),
        lambda: llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False),
    ):
        with pytest.raises(RequestError, match="the engine sleeps: call wake_up first"):
            call()
    with pytest.raises(EngineConflict, match="sleeps already"):
        llm.engine.sleep()
    assert llm.engine.step() == []
    llm.engine.wake_up()
    assert tokens(llm) == before


def greedy_by_hf(model: Any) -> list[int]:
    import torch

    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0)
    return list(out[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("level", [True, 0, 3, "1"])
def test_what_is_no_level_is_named_even_asleep(llm: LLM, level: Any) -> None:
    with pytest.raises(ConfigError, match=f"sleep level {level!r}"):
        llm.sleep(level)
    llm.sleep(1)
    with pytest.raises(ConfigError, match=f"sleep level {level!r}"):
        llm.sleep(level)
    llm.wake_up()
    assert len(tokens(llm)) == 6
