"""What is no adapter of the model, or asks for what is not served, is refused with what it is and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, LoRARequest
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.lora import AdapterNotFound
from dovetail.testing.tiny_adapters import PREFIX, save_adapter
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

MakeLLM = Callable[..., LLM]
Q_PROJ = f"{PREFIX}model.layers.0.self_attn.q_proj"
LAYER = f"{PREFIX}model.layers.0"


@pytest.fixture(scope="module")
def shared_llm(tiny_llama: tuple[Path, Any]) -> Iterator[LLM]:
    sections: dict[str, Any] = {
        "model": {"path": str(tiny_llama[0]), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 400},
        "executor": {"threads": 1},
        "lora": {"enabled": True, "max_rank": 8},
    }
    with LLM(**sections) as created:
        yield created


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """One for all tests; adapters of a test are unloaded after it."""
    yield shared_llm
    for each in shared_llm.list_loras():
        shared_llm.remove_lora(each.name)


@pytest.fixture
def adapter(tmp_path: Path, tiny_llama: tuple[Path, Any]) -> Path:
    return save_adapter(tmp_path / "adapter", tiny_llama[0], seed=1)


def change_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


def refusal(llm: LLM, adapter: Path) -> str:
    with pytest.raises(RequestError) as caught:
        llm.add_lora(LoRARequest("pirate", 0, str(adapter)))
    text = str(caught.value)
    assert text.startswith("adapter 'pirate' cannot be loaded: ")
    assert llm.list_loras() == []
    return text


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"use_dora": True}, ["DoRA", "merge_and_unload"]),
        ({"bias": "all"}, ["bias: 'all'", "merge_and_unload"]),
        ({"lora_bias": True}, ["lora_bias", "merge_and_unload"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "merge_and_unload"]),
        ({"trainable_token_indices": [1]}, ["changed embeddings", "merge_and_unload"]),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, ["experts", "merge_and_unload"]),
        ({"peft_type": "IA3"}, ["'IA3'", "only LORA"]),
        ({"r": 5}, ["has rank 4, and adapter_config.json says 5"]),
        ({"r": "4"}, ["the rank of model.layers.0.", "is '4', which is no number"]),
        ({"lora_alpha": "much"}, ["lora_alpha 'much' is no number"]),
        ({"lora_alpha": 1e39}, ["lora_alpha 1e+39 is no number that float32 holds"]),
    ],
)
def test_a_config_that_asks_for_what_is_not_served(
    llm: LLM, tmp_path: Path, tiny_llama: tuple[Path, Any], config: dict[str, Any], parts: list[str]
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tiny_llama[0], seed=1, **config)
    text = refusal(llm, adapter)
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda t: t.pop(f"{Q_PROJ}.lora_B.weight"),
            ["layers.0.self_attn.q_proj has lora_A alone", "save the adapter"],
        ),
        (lambda t: t.clear(), ["holds no adapter"]),
        (
            lambda t: t.update({f"{Q_PROJ}.lora_A.weight": torch.ones(3, 64)}),
            ["q_proj has lora_A [3, 64] and lora_B [64, 4]"],
        ),
        (lambda t: t.update({f"{LAYER}.mlp.gate_proj.lora_magnitude_vector": torch.ones(4)}), ["magnitudes of DoRA"]),
        (lambda t: t.update({f"{Q_PROJ}.lora_B.bias": torch.ones(4)}), ["biases"]),
        (lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}), ["embeddings"]),
        (lambda t: t.update({f"{PREFIX}lm_head.modules_to_save.weight": torch.ones(4, 4)}), ["whole layers"]),
        (lambda t: t.update({"something": torch.ones(4)}), ["no lora_A or lora_B", "something"]),
        (
            lambda t: t.update(
                {
                    f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 64),
                    f"{PREFIX}lm_head.lora_B.weight": torch.ones(9, 4),
                }
            ),
            ["the output layer (lm_head)", "merge_and_unload"],
        ),
        (
            lambda t: t.update(
                {
                    f"{LAYER}.mlp.experts.3.up_proj.lora_A.weight": torch.ones(4, 64),
                    f"{LAYER}.mlp.experts.3.up_proj.lora_B.weight": torch.ones(9, 4),
                }
            ),
            ["experts of a mixture", "merge_and_unload"],
        ),
        (
            lambda t: t[f"{Q_PROJ}.lora_B.weight"][3, 1].fill_(torch.nan),
            ["lora_B of model.layers.0.self_attn.q_proj holds NaN or infinity"],
        ),
        (
            lambda t: t[f"{Q_PROJ}.lora_B.weight"][3, 1].fill_(3e38),
            ["lora_B of model.layers.0.self_attn.q_proj times its scale has numbers beyond float32"],
        ),
        (lambda t: t.update({name: tensor.to(torch.int64) for name, tensor in t.items()}), ["dtype I64", "floats"]),
    ],
    ids=[
        *("A without B", "nothing", "no pair", "DoRA", "bias", "embeddings", "saved modules", "other", "output layer"),
        *("experts", "NaN", "too large", "integers"),
    ],
)
def test_tensors_that_are_no_adapter_of_linear_layers(
    llm: LLM, adapter: Path, change: Callable[[dict[str, torch.Tensor]], object], parts: list[str]
) -> None:
    change_tensors(adapter, change)
    text = refusal(llm, adapter)
    assert [part for part in parts if part not in text] == []


def test_an_adapter_of_another_model_names_the_shapes(llm: LLM, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "other", tiny_config("llama", hidden_size=32, intermediate_size=80))
    text = refusal(llm, save_adapter(tmp_path / "adapter", tmp_path / "other", seed=1))
    assert "does not fit this model" in text
    assert "self_attn.q_proj is for a layer [32, 32], and the model's is [64, 64]" in text


def test_an_adapter_of_a_deeper_model_names_the_layers(llm: LLM, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "other", tiny_config("llama", num_hidden_layers=3))
    text = refusal(llm, save_adapter(tmp_path / "adapter", tmp_path / "other", seed=1))
    assert "no linear layer that takes adapters called model.layers.2." in text


def without(tensors: dict[str, torch.Tensor], *parts: str) -> None:
    """Takes out the layers of these names."""
    for name in [name for name in tensors if any(part in name for part in parts)]:
        del tensors[name]


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "down_proj"], r".*\.(q_proj|down_proj)", "all-linear"],
    ids=["ends of names", "pattern", "all"],
)
@pytest.mark.parametrize(
    ("gone", "listed"),
    [
        ("layers.1.", "model.layers.1.self_attn.q_proj, model.layers.1.mlp.down_proj"),
        ("layers.0.mlp", "model.layers.0.mlp.down_proj"),
    ],
)
def test_an_adapter_that_lacks_layers_of_its_targets(
    llm: LLM, tmp_path: Path, tiny_llama: tuple[Path, Any], targets: Any, gone: str, listed: str
) -> None:
    ends = ("q_proj", "down_proj")
    adapter = save_adapter(tmp_path / "adapter", tiny_llama[0], 1, targets=ends, target_modules=targets)
    change_tensors(adapter, lambda tensors: without(tensors, gone))
    text = refusal(llm, adapter)
    assert all(name in text for name in listed.split(", "))
    assert text.count("_proj") == listed.count("_proj")


@pytest.mark.parametrize(
    ("config", "gone"),
    [
        ({"layers_to_transform": [0]}, "layers.1."),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, "layers.1."),
        ({"exclude_modules": [r"layers.1.mlp.down_proj"]}, "layers.1.mlp.down_proj"),
        ({"target_modules": ["q_proj", "layers.0.mlp.down_proj"]}, "layers.1.mlp.down_proj"),
        ({"target_modules": r".*layers\.0\..*|.*q_proj"}, "layers.1.mlp.down_proj"),
        ({"target_modules": ["q_proj", "down_proj", "c_attn"], "rank_pattern": {"q_proj": 4}}, "nothing"),
        (
            {"target_modules": ["q_proj", "down_proj", "up_proj"]},
            "nothing",
        ),  # up_proj may be fused where it was trained
        ({"target_modules": None}, "layers.1."),
        ({"target_modules": "("}, "layers.1."),
    ],
)
def test_layers_that_may_be_left_out(
    llm: LLM, tmp_path: Path, tiny_llama: tuple[Path, Any], config: dict[str, Any], gone: str
) -> None:
    given = {"target_modules": ["q_proj", "down_proj"]} | config
    adapter = save_adapter(tmp_path / "adapter", tiny_llama[0], 1, targets=("q_proj", "down_proj"), **given)
    change_tensors(adapter, lambda tensors: without(tensors, gone))
    assert llm.add_lora(LoRARequest("pirate", 0, str(adapter))).name == "pirate"


def test_refused_adapters_leave_no_name_and_no_number(llm: LLM, adapter: Path, tmp_path: Path) -> None:
    for name in ("bad", "worse"):
        with pytest.raises(AdapterNotFound):
            llm.add_lora(LoRARequest(name, 0, str(tmp_path / name)))
    assert llm.add_lora(LoRARequest("good", 0, str(adapter))).int_id == 1
    with pytest.raises(AdapterNotFound, match=r"no adapter 'bad' is loaded \(loaded are good\): load it first"):
        llm.generate([[1, 2]], use_tqdm=False, lora_request=LoRARequest("bad"))
    with pytest.raises(AdapterNotFound, match=r"no adapter 7 is loaded: loaded are good$"):
        llm.remove_lora(7)


def test_a_rank_that_no_slot_holds(llm: LLM, tmp_path: Path, tiny_llama: tuple[Path, Any]) -> None:
    text = refusal(llm, save_adapter(tmp_path / "adapter", tiny_llama[0], seed=1, rank=16))
    assert "its rank is 16, and slots hold up to 8: raise lora.max_rank" in text


def test_a_pickle_is_never_read(llm: LLM, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    text = refusal(llm, adapter)
    assert "adapter_model.bin, a pickle, which can run code" in text
    assert "safe_serialization=True" in text


def test_folders_that_are_no_adapters(llm: LLM, adapter: Path, tmp_path: Path, tiny_llama: tuple[Path, Any]) -> None:
    assert "it has no adapter_config.json" in refusal(llm, tiny_llama[0])
    assert f"did you mean {adapter}?" in refusal(llm, tmp_path)
    assert "is a file" in refusal(llm, adapter / "adapter_config.json")
    with pytest.raises(AdapterNotFound, match="nowhere is not there: give the local folder"):
        llm.add_lora(LoRARequest("pirate", 0, str(tmp_path / "nowhere")))
    (adapter / "adapter_model.safetensors").unlink()
    assert "has adapter_config.json and no adapter_model.safetensors" in refusal(llm, adapter)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"peft_type": "LORA", "rank_pattern": [1]}'])
def test_a_config_that_cannot_be_read(llm: LLM, adapter: Path, text: str) -> None:
    (adapter / "adapter_config.json").write_text(text)
    assert "adapter_config.json" in refusal(llm, adapter)


@pytest.mark.parametrize("length", [0, 4, 100, 2000, -1])
def test_a_file_that_was_cut_short(llm: LLM, adapter: Path, length: int) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    assert "is damaged or cut short, or no safetensors file" in refusal(llm, adapter)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, 1 << 40]},
        {"dtype": "F32", "shape": [4, 64], "data_offsets": [-1024, 0]},
        {"dtype": "F32", "shape": [4, 65], "data_offsets": [0, 1024]},
        {"dtype": "F32", "shape": "many", "data_offsets": [0, 1024]},
        {"dtype": "F32"},
        7,
    ],
)
def test_a_header_that_lies(llm: LLM, adapter: Path, entry: Any) -> None:
    header = json.dumps({f"{Q_PROJ}.lora_A.weight": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(1024)
    (adapter / "adapter_model.safetensors").write_bytes(data)
    assert "is damaged or cut short, or no safetensors file" in refusal(llm, adapter)


def test_a_family_that_takes_no_adapters_is_refused_before_weights_are_read(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"applies no adapters: set lora\.enabled to false"):
        make_llm(lora={"enabled": True}, model={"family": "transformers"})
