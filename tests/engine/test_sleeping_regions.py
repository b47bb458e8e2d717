"""Parts of an engine's memory sleep and wake up by name; what is illegal changes nothing, and memory comes back."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import CapacityError, ConfigError, RequestError
from dovetail.contracts.pausing import EngineConflict
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [3 + 7 * i % 120 for i in range(22)]
ASLEEP = {"weights": "asleep", "kv_cache": "asleep"}
AWAKE = {"weights": "resident", "kv_cache": "resident"}


def tokens(llm: LLM, **request: Any) -> list[int]:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False, **request)[0].outputs[0].token_ids


def states(llm: LLM) -> dict[str, str]:
    return {one.name: one.state.value for one in llm.regions()}


@pytest.mark.parametrize("level", [1, 2])
def test_weights_wake_up_before_the_kv_cache(make_llm: Callable[..., LLM], level: int) -> None:
    llm = make_llm()
    before = tokens(llm)
    llm.sleep(level)
    assert states(llm) == ASLEEP
    llm.wake_up(["weights"])
    assert states(llm) == {**ASLEEP, "weights": "resident"}
    with pytest.raises(EngineConflict, match=r"call wake_up first \(kv_cache\)"):
        tokens(llm)
    llm.wake_up(["kv_cache"])
    hits = llm.engine.cache_statistics().prefix_hit_tokens
    assert tokens(llm) == before
    assert llm.engine.cache_statistics().prefix_hit_tokens == hits, "no page of before the sleep is found"


def test_the_kv_cache_sleeps_alone_and_is_empty_afterwards(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    before = tokens(llm)
    assert tokens(llm) == before
    hits = llm.engine.cache_statistics().prefix_hit_tokens
    assert hits > 0
    llm.sleep(1, ["kv_cache"])
    llm.wake_up()
    assert tokens(llm) == before
    assert llm.engine.cache_statistics().prefix_hit_tokens == hits
    llm.sleep(2, ["kv_cache"])
    llm.sleep(2, ["weights"])
    llm.wake_up()
    assert tokens(llm) == before


Refused = tuple[Callable[[LLM], Any], type[Exception], str]
REFUSED: dict[int, list[Refused]] = {
    0: [
        (lambda llm: llm.sleep(1, ["weights"]), EngineConflict, "weights cannot sleep while kv_cache is awake"),
        (lambda llm: llm.wake_up(), EngineConflict, "the engine is awake"),
        (lambda llm: llm.sleep(3), ConfigError, "sleep level 3"),
        (lambda llm: llm.sleep(1, ["kv"]), RequestError, "no region 'kv'"),
        (lambda llm: llm.sleep(1, ["drafter:x"]), RequestError, "no drafter 'drafter:x'"),
        (lambda llm: llm.sleep(1, []), RequestError, "tags is empty"),
    ],
    1: [
        (lambda llm: llm.sleep(), EngineConflict, "sleeps already"),
        (lambda llm: llm.wake_up(["kv_cache"]), EngineConflict, "kv_cache cannot wake up before weights"),
        (tokens, EngineConflict, "the engine sleeps: call wake_up first"),
    ],
    2: [(lambda llm: llm.wake_up(new_weights=True, for_update=True), RequestError, "choose one")],
}
"""By the level at which the engine sleeps; 0: it is awake."""


@pytest.mark.parametrize("level", REFUSED)
def test_what_is_illegal_changes_nothing(make_llm: Callable[..., LLM], level: int) -> None:
    llm = make_llm()
    before = tokens(llm)
    if level:
        llm.sleep(level)
    was = llm.regions()
    for call, error, message in REFUSED[level]:
        with pytest.raises(error, match=message):
            call(llm)
        assert llm.regions() == was
    if level:
        llm.wake_up()
    assert states(llm) == AWAKE
    assert tokens(llm) == before


def test_weights_that_wait_for_an_update_are_invalid_until_it_is_whole(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """What a trainer does that sends weights after each step: nothing is read from disk."""
    for seed, name in enumerate(("old", "new")):
        save_tiny_model(tmp_path / name, tiny_config("llama"), seed=seed)
    llm = make_llm(model={"path": str(tmp_path / "old")}, weight_transport="in_process")
    new = tokens(make_llm(model={"path": str(tmp_path / "new")}))
    assert tokens(llm) != new
    weights = load_file(tmp_path / "new" / "model.safetensors")
    llm.init_weight_transfer_engine()
    for _ in range(2):  # the second time the checkpoint does not hold what sleeps
        llm.sleep(2)
        llm.wake_up(for_update=True)
        assert states(llm) == {"weights": "invalid", "kv_cache": "asleep"}
        with pytest.raises(EngineConflict, match="kv_cache cannot wake up before weights are there"):
            llm.wake_up()
        with pytest.raises(EngineConflict, match="discarded by sleep level 2"):
            llm.start_weight_update(partial=True)
        llm.start_weight_update()
        llm.update_weights({"weights": weights})
        llm.finish_weight_update()
        llm.wake_up(["kv_cache"])
        assert tokens(llm) == new


def test_weights_that_an_update_broke_are_read_again_by_a_sleep(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.nn import RMSNorm

    for seed, name in enumerate(("old", "new")):
        save_tiny_model(tmp_path / name, tiny_config("llama"), seed=seed)
    llm = make_llm(model={"path": str(tmp_path / "old")}, weight_transport="in_process")
    before = tokens(llm)
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"weights": load_file(tmp_path / "new" / "model.safetensors")})
    with monkeypatch.context() as patched:
        load = RMSNorm.load

        def fail(self: RMSNorm, name: str, tensor: torch.Tensor) -> None:
            if not self.weight.is_meta:
                raise OSError("the disk is gone")
            load(self, name, tensor)

        patched.setattr(RMSNorm, "load", fail)
        with pytest.raises(OSError, match="disk is gone"):
            llm.finish_weight_update()
    assert states(llm) == {"weights": "invalid", "kv_cache": "resident"}
    with pytest.raises(EngineConflict, match=r"invalid: an update failed while it wrote them .*disk is gone"):
        tokens(llm)
    with pytest.raises(EngineConflict, match="weights is invalid: complete an update"):
        llm.sleep(1)
    llm.sleep(2)
    llm.wake_up()
    assert states(llm) == AWAKE
    assert tokens(llm) == before
    assert llm.weights().version == 0


def test_an_update_in_part_does_not_end_over_weights_that_were_discarded_meanwhile(
    make_llm: Callable[..., LLM], tiny_llama: tuple[Path, Any]
) -> None:
    llm = make_llm(weight_transport="in_process")
    weights = load_file(tiny_llama[0] / "model.safetensors")
    name = next(iter(weights))
    llm.init_weight_transfer_engine()
    llm.start_weight_update(partial=True)
    llm.update_weights({"weights": {name: weights[name]}})
    llm.sleep(2)
    llm.wake_up(for_update=True)
    with pytest.raises(EngineConflict, match="discarded by sleep level 2"):
        llm.finish_weight_update()
    assert states(llm) == {"weights": "invalid", "kv_cache": "asleep"}


def test_a_checkpoint_that_cannot_be_read_leaves_the_engine_asleep(
    make_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.nn import RMSNorm

    save_tiny_model(tmp_path, tiny_config("llama"))
    llm = make_llm(model={"path": str(tmp_path)})
    before = tokens(llm)
    llm.sleep(2)
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise OSError("the disk is gone")

        patched.setattr(RMSNorm, "load", fail)
        with pytest.raises(OSError, match="disk is gone"):
            llm.wake_up(["weights"])
    assert states(llm) == ASLEEP
    llm.wake_up()
    assert tokens(llm) == before


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Medusa heads that share the target's unembedding for some tokens."""
    folder = tmp_path_factory.mktemp("heads")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for k in range(3):
        tensors[f"{k}.0.linear.weight"] = torch.randn(64, 64, generator=generator) * 0.05
        tensors[f"{k}.0.linear.bias"] = torch.randn(64, generator=generator) * 0.05
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    save_file({"token_ids": torch.arange(0, 128, 2)}, folder / "draft_vocabulary.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    return folder


def drafters(path: Path, heads: Path) -> dict[str, Any]:
    chosen: Mapping[str, Mapping[str, Any]] = {
        "small": {"name": "draft_model", "path": str(path)},
        "heads": {"name": "medusa", "path": str(heads)},
        "both": {"name": "cascade", "stages": ["heads", "small"]},
    }
    return {name: {"num_tokens": 3, "length": "fixed", **one} for name, one in chosen.items()}


def drafted(llm: LLM, drafter: str) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=24, speculation=drafter)
    output = llm.generate([PROMPT], params, use_tqdm=False)[0]
    assert output.metrics is not None
    return [output.outputs[0].token_ids, output.metrics.num_drafted, output.metrics.num_accepted]


def test_drafters_sleep_by_their_names(make_llm: Callable[..., LLM], tiny_llama: tuple[Path, Any], heads: Path) -> None:
    """At each level their weights are set aside."""
    section = drafters(tiny_llama[0], heads)
    llm = make_llm(speculative={"drafters": section, "default": "small"})
    before = {name: drafted(llm, name) for name in section}
    assert llm.sleep(1, ["drafter:small"]) > 100_000
    assert states(llm) == {**AWAKE, "drafter:small": "asleep", "drafter:heads": "resident", "drafter:both": "resident"}
    for needing in ("small", "both"):
        with pytest.raises(EngineConflict, match="the drafter 'small' is asleep"):
            drafted(llm, needing)
    assert drafted(llm, "heads")[0] == before["heads"][0]
    with pytest.raises(EngineConflict, match="drafter:small sleeps already"):
        llm.sleep(1, ["drafter:small", "drafter:heads"])
    assert llm.sleep(2, ["drafter:heads"]) > 0
    llm.sleep(2)  # the rest
    assert set(states(llm).values()) == {"asleep"}
    llm.wake_up(["weights", "kv_cache", "drafter:heads"])
    assert drafted(llm, "heads") == before["heads"]
    llm.wake_up()
    llm.reset_prefix_cache()
    assert {name: drafted(llm, name) for name in section} == before


def test_a_drafter_that_slept_through_an_update_of_the_target_hears_of_it(
    make_llm: Callable[..., LLM], tmp_path: Path, heads: Path
) -> None:
    """Its copy of the target's unembedding is made again."""
    for seed, name in enumerate(("old", "new")):
        save_tiny_model(tmp_path / name, tiny_config("llama"), seed=seed)
    speculative = {"drafters": {"heads": {"name": "medusa", "path": str(heads), "num_tokens": 3, "length": "fixed"}}}
    wanted = drafted(make_llm(model={"path": str(tmp_path / "new")}, speculative=speculative), "heads")
    llm = make_llm(model={"path": str(tmp_path / "old")}, speculative=speculative, weight_transport="in_process")
    llm.sleep(2)
    llm.wake_up(["weights"], for_update=True)
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"weights": load_file(tmp_path / "new" / "model.safetensors")})
    llm.finish_weight_update()
    llm.wake_up()
    assert drafted(llm, "heads") == wanted


def in_memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and pages of kernels go back on Linux only")
@pytest.mark.parametrize("quantization", [None, "q8"])
def test_memory_comes_back_on_a_cpu(make_llm: Callable[..., LLM], tmp_path: Path, quantization: str | None) -> None:
    """Weights and the pages that were used, at both levels."""
    config = tiny_config("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    save_tiny_model(tmp_path / "model", config)
    method = {"quantization": quantization} if quantization is not None else {}
    llm = make_llm(model={"path": str(tmp_path / "model"), "packed_cache_gib": 0, **method})
    before = tokens(llm)
    llm.sleep(1)  # what the C library kept of the start goes back too
    llm.wake_up()
    weights = sum(t.numel() for t in load_file(tmp_path / "model" / "model.safetensors").values())
    wanted = weights * (4 if quantization is None else 1)
    for level in (1, 2):
        held = in_memory()
        reported = llm.sleep(level)
        given_back = held - in_memory()
        assert reported > 0.9 * wanted
        assert given_back > 0.8 * wanted
        llm.wake_up()
        assert tokens(llm) == before


def test_weights_that_cannot_be_set_aside_stay(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    before = tokens(llm)

    class Full:
        """A file on a disk without space."""

        def seek(self, _: int) -> None:
            return None

        def write(self, _: memoryview) -> int:
            raise OSError("no space left on device")

        def close(self) -> None:
            return None

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", lambda **_: Full())
        with pytest.raises(CapacityError, match=r"set aside in a file .*no space left.*TMPDIR"):
            llm.sleep(1)
    assert states(llm) == AWAKE
    assert tokens(llm) == before
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == before


def test_requests_that_a_pause_keeps_may_need_a_drafter_that_sleeps(
    make_llm: Callable[..., LLM], tiny_llama: tuple[Path, Any]
) -> None:
    speculative = {"drafters": {"small": {"name": "draft_model", "path": str(tiny_llama[0]), "num_tokens": 3}}}
    llm = make_llm(speculative=speculative)
    before = tokens(llm)
    engine = llm.engine
    engine.add_request("kept", PROMPT, GREEDY)
    engine.step()
    engine.pause("keep").result()
    engine.sleep(1)
    engine.wake_up(["weights", "kv_cache"])
    with pytest.raises(EngineConflict, match="the drafter 'small' is asleep"):
        engine.resume()
    assert engine.is_paused()
    engine.wake_up()
    engine.resume()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == before
