"""What is wrong with an update is said in words, with names and shapes, and the old weights serve on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM
from dovetail.contracts.errors import ConfigError, DovetailError, ModelError, RequestError
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.weight_transport import WeightUpdateConflict
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from tests.engine.weights.conftest import GREEDY, send, told

NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_missing_tensors_are_named(make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]) -> None:
    llm = make()
    old = told(llm)
    some = {name: tensor for name, tensor in new_weights.items() if name not in (NORM, QUERY)}
    with pytest.raises(ModelError, match=rf"missing \(2\).*{QUERY} \[64, 64\].*{NORM} \[64\]"):
        send(llm, some)
    assert told(llm) == old
    assert llm.weights().version == 0
    send(llm, new_weights)  # and the next one begins anew
    assert told(llm) != old


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (NORM, torch.zeros(65), r"model.norm.weight has shape \[65\], the config implies \[64\]"),
        (NORM, torch.zeros(64, dtype=torch.int64), "model.norm.weight is int64"),
        (NORM, torch.zeros(64, dtype=torch.complex64), "model.norm.weight is complex64"),
        (NORM, torch.zeros(64, device="meta"), "model.norm.weight is on the meta device"),
        (NORM, torch.zeros(64).to_sparse(), "model.norm.weight is of layout torch.sparse_coo"),
        (NORM, torch.tensor([*[1.0] * 63, float("nan")]), "NaN or infinite: model.norm.weight"),
        ("model.layers.0.mlp.extra.weight", torch.zeros(3), r"not expected \(1\).*mlp.extra.weight \[3\]"),
    ],
    ids=("shape", "dtype", "complex", "meta", "sparse", "nan", "name"),
)
@pytest.mark.parametrize("quantization", [None, "q8"])
def test_what_does_not_fit_is_refused_before_anything_is_written(
    make: Callable[..., LLM],
    new_weights: Mapping[str, torch.Tensor],
    name: str,
    tensor: torch.Tensor,
    words: str,
    quantization: str | None,
) -> None:
    llm = make(model={"quantization": quantization})
    old = told(llm)
    with pytest.raises(ModelError, match=words):
        send(llm, {**new_weights, name: tensor})
    assert told(llm) == old


def test_a_tensor_comes_once(make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]) -> None:
    llm = make()
    old = told(llm)
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"weights": dict(new_weights)})
    with pytest.raises(ModelError, match=f"{NORM} came twice"):
        llm.update_weights({"weights": {NORM: new_weights[NORM]}})
    assert told(llm) == old


def test_part_of_a_layer_that_loads_whole_is_refused_before_anything_is_written(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of a quantization method may take all rows of a fused layer or none."""
    from dovetail.plugins.quantization.int8 import Int8Method

    monkeypatch.setattr(Int8Method, "capabilities", replace(Int8Method.capabilities, reloads_rows=False))
    llm = make(model={"quantization": "int8", "dtype": "bfloat16"})
    old = told(llm)
    with pytest.raises(ModelError, match=r"q_proj.weight cannot be loaded without"):
        send(llm, {NORM: new_weights[NORM], QUERY: new_weights[QUERY]}, num_buckets=1, partial=True)
    assert told(llm) == old


PHASES: dict[str, Callable[[LLM], Any]] = {
    "start before init": lambda llm: llm.start_weight_update(),
    "update before start": lambda llm: llm.update_weights({}),
    "finish before start": lambda llm: llm.finish_weight_update(),
}


@pytest.mark.parametrize("phase", PHASES)
def test_phases_come_in_their_order(make: Callable[..., LLM], phase: str) -> None:
    with pytest.raises(WeightUpdateConflict, match="first"):
        PHASES[phase](make())


def test_one_update_at_a_time(make: Callable[..., LLM]) -> None:
    llm = make()
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    for again in (llm.start_weight_update, llm.init_weight_transfer_engine):
        with pytest.raises(WeightUpdateConflict, match="under way"):
            again()
    llm.abort_weight_update()
    llm.start_weight_update()
    with pytest.raises(ModelError, match="no bucket"):
        llm.finish_weight_update()


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [
        (3, WeightUpdateConflict, "3 is not higher than 5"),
        (5, WeightUpdateConflict, "5 is not higher"),
        ("6", RequestError, "must be an integer"),
        (True, RequestError, "must be an integer"),
    ],
)
def test_versions_go_up(
    make: Callable[..., LLM],
    new_weights: Mapping[str, torch.Tensor],
    version: Any,
    error: type[DovetailError],
    words: str,
) -> None:
    llm = make()
    send(llm, new_weights, weight_version=5)
    with pytest.raises(error, match=words):
        llm.start_weight_update(weight_version=version)


def test_weights_stay_while_requests_run(make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]) -> None:
    llm = make()
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.engine.add_request("a", [5, 6, 7], GREEDY)
    llm.engine.step()
    with pytest.raises(WeightUpdateConflict, match="while requests are unfinished that no pause holds"):
        llm.update_weights({"weights": dict(new_weights)})
    with pytest.raises(WeightUpdateConflict, match="while requests are unfinished"):
        llm.start_weight_update()
    llm.engine.abort_request("a")
    send(llm, new_weights)


def test_weights_stay_while_the_engine_sleeps(make: Callable[..., LLM]) -> None:
    llm = make()
    llm.init_weight_transfer_engine()
    llm.sleep()
    with pytest.raises(WeightUpdateConflict, match="sleeps"):
        llm.start_weight_update()


def test_the_checkpoint_is_not_taken_for_weights_that_were_updated(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]
) -> None:
    """At level 2 they are lost; at level 1 they are kept."""
    llm = make()
    old = told(llm)
    send(llm, new_weights)
    new = told(llm)
    llm.sleep(1)
    llm.wake_up()
    assert told(llm) == new
    llm.sleep(2)
    with pytest.raises(ModelError, match=r"were updated after they were read.*new_weights=True"):
        llm.wake_up()
    llm.wake_up(new_weights=True)
    assert told(llm) == old
    assert (llm.weights().version, llm.weights().checksum) == (2, "")


def test_weights_that_were_written_in_part_serve_nobody(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while weights are written: requests are refused until all are replaced."""
    from dovetail.nn import RMSNorm

    llm = make()
    old = told(llm)
    with monkeypatch.context() as patched:
        load = RMSNorm.load

        def fail(self: RMSNorm, name: str, tensor: torch.Tensor) -> None:
            if not self.weight.is_meta and "layers.1" in name:
                raise OSError("the disk is gone")
            load(self, name, tensor)

        patched.setattr(RMSNorm, "load", fail)
        with pytest.raises(OSError, match="disk is gone"):
            send(llm, new_weights)
    with pytest.raises(EngineConflict, match=r"weights are invalid.*disk is gone"):
        told(llm)
    with pytest.raises(WeightUpdateConflict, match="weights are invalid"):
        llm.start_weight_update(partial=True)
    send(llm, new_weights)
    assert told(llm) == told(make("new")) != old


def test_a_checkpoint_of_another_model(make: Callable[..., LLM], tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "wide", tiny_config("llama", hidden_size=32))
    llm = make(weight_transport="disk")
    old = told(llm)
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    with pytest.raises(ModelError, match="no file or directory"):
        llm.update_weights({"path": str(tmp_path / "none")})
    llm.start_weight_update()
    llm.update_weights({"path": str(tmp_path / "wide")})
    with pytest.raises(ModelError, match=r"has shape \[.*32.*\], the config implies"):
        llm.finish_weight_update()
    assert told(llm) == old


@pytest.mark.parametrize("info", [{}, {"weights": 3}, {"weights": {"a": [1.0]}}, {"weights": {}, "more": 1}, 5])
def test_odd_buckets_are_refused(make: Callable[..., LLM], info: Any) -> None:
    llm = make()
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    with pytest.raises(RequestError):
        llm.update_weights(info)


def test_what_the_config_leaves_out_is_named(make: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match="set weight_transport"):
        make(weight_transport=None).init_weight_transfer_engine()
    with pytest.raises(DovetailError, match="carrier_pigeon"):
        make(weight_transport="carrier_pigeon")
    with pytest.raises(ConfigError, match="unknown key"):
        make(weight_transport={"name": "disk", "speed": 1})
    llm = make()
    with pytest.raises(RequestError, match="takes no init_info"):
        llm.init_weight_transfer_engine({"address": "x"})
    llm.init_weight_transfer_engine()
    with pytest.raises(RequestError, match="kernels' own layouts"):
        llm.start_weight_update(False)
    llm.start_weight_update()
    with pytest.raises(RequestError, match="there is no drafter 'heads'"):
        llm.update_weights({"weights": {}}, drafter="heads")


@pytest.mark.parametrize("transport", ["in_process", "disk"])
def test_tied_tensors_that_differ_are_refused_before_anything_is_written(
    make_llm: Callable[..., LLM], tmp_path: Path, transport: str
) -> None:
    model = save_tiny_model(tmp_path / "tied", tiny_config("llama", tie_word_embeddings=True))
    llm = make_llm(model={"path": str(tmp_path / "tied")}, weight_transport=transport)
    old = told(llm)
    table = model.state_dict()["model.embed_tokens.weight"]
    weights = {name: 1.1 * tensor for name, tensor in model.state_dict().items()} | {"lm_head.weight": table.clone()}
    (tmp_path / "new").mkdir()
    save_file(weights, tmp_path / "new" / "model.safetensors")
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"weights": weights} if transport == "in_process" else {"path": str(tmp_path / "new")})
    with pytest.raises(ModelError, match=r"and (lm_head|model\.embed_tokens)\.weight differ") as refused:
        llm.finish_weight_update()
    assert any("the weights are the old ones" in note for note in refused.value.__notes__)
    assert told(llm) == old


def test_a_version_that_was_promised_may_be_overtaken(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]
) -> None:
    """By a checkpoint that is read while an update is under way."""
    llm = make()
    llm.init_weight_transfer_engine()
    assert llm.start_weight_update() == 1
    llm.sleep(2)
    llm.wake_up(new_weights=True)
    assert llm.weights().version == 1
    llm.update_weights({"weights": dict(new_weights)})
    with pytest.raises(WeightUpdateConflict, match="weight_version 1 is not higher than 1"):
        llm.finish_weight_update()
    assert send(llm, new_weights).version == 2


@pytest.mark.parametrize("option", ["new_weights", "for_update"])
def test_weights_that_were_set_aside_take_no_others(make: Callable[..., LLM], option: str) -> None:
    llm = make()
    llm.sleep(1)
    with pytest.raises(EngineConflict, match=f"{option} is for weights that sleep level 2 discarded"):
        llm.wake_up(**{option: True})
    llm.wake_up()
    assert llm.weights().version == 0


def test_invalid_weights_are_not_called_the_old_ones(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor]
) -> None:
    llm = make()
    llm.init_weight_transfer_engine()
    llm.sleep(2)
    llm.wake_up(for_update=True)
    with pytest.raises(ModelError) as refused:
        send(llm, {NORM: new_weights[NORM]}, num_buckets=1)
    assert any("some weights are invalid, as before" in note for note in refused.value.__notes__)
