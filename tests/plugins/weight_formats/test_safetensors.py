"""Directories of safetensors files, against the library that wrote them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import GenerationConfig

from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weights import ModelFiles
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c.weight": torch.tensor([[7, 8]], dtype=torch.float16),
    "d.weight": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "e.ids": torch.tensor([3, -1]),
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}


@pytest.fixture
def weight_format() -> SafetensorsFormat:
    return SafetensorsFormat(PluginOptions())


def files(path: Path) -> ModelFiles:
    return ModelFiles(str(path), path)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    weight_map = {}
    for number, names in enumerate((["a.weight", "b.weight"], ["c.weight", "d.weight", "e.ids"]), 1):
        name = f"model-{number:05}-of-00002.safetensors"
        save_file({key: TENSORS[key] for key in names}, tmp_path / name)
        weight_map.update(dict.fromkeys(names, name))
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_is_found_and_described(
    layout: str, request: pytest.FixtureRequest, weight_format: SafetensorsFormat
) -> None:
    reader = weight_format.open(files(request.getfixturevalue(layout)))
    infos = {info.name: info for info in reader.infos()}
    assert infos.keys() == TENSORS.keys()
    for name, tensor in reader.tensors():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor.view(torch.uint8), TENSORS[name].view(torch.uint8))
        assert infos[name].shape == tuple(tensor.shape)
        assert infos[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert infos[name].num_bytes == tensor.numel() * tensor.element_size()


def test_one_file_takes_its_config_from_beside_it(single: Path, weight_format: SafetensorsFormat) -> None:
    path = single / "model.safetensors"
    assert weight_format.config(files(path))["hidden_size"] == 64
    assert len(weight_format.open(files(path)).infos()) == len(TENSORS)


def test_an_odd_name_will_do_where_there_is_one_file(single: Path, weight_format: SafetensorsFormat) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert len(weight_format.open(files(single)).infos()) == len(TENSORS)
    save_file(TENSORS, single / "others.safetensors")
    with pytest.raises(ModelError, match=r"found: others\.safetensors, weights\.safetensors"):
        weight_format.open(files(single))


def test_generation_defaults_are_part_of_the_config(single: Path, weight_format: SafetensorsFormat) -> None:
    assert weight_format.config(files(single)) == {**CONFIG, "generation_config": {}}
    write_json(single / "generation_config.json", {"eos_token_id": [1, 2]})
    assert weight_format.config(files(single)) == {**CONFIG, "generation_config": {"eos_token_id": [1, 2]}}


def test_a_missing_shard_is_named(sharded: Path, weight_format: SafetensorsFormat) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files .* model-00002-of-00002\.safetensors"):
        weight_format.open(files(sharded))


def test_an_index_that_promises_too_much_is_refused(sharded: Path, weight_format: SafetensorsFormat) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["z.weight"] = "model-00001-of-00002.safetensors"
    write_json(index, content)
    with pytest.raises(ModelError, match=r"names tensors that no file has: z\.weight"):
        weight_format.open(files(sharded))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": {}}'])
def test_a_broken_index_is_refused(content: str, sharded: Path, weight_format: SafetensorsFormat) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        weight_format.open(files(sharded))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_a_model_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelError, match=r"cut\.safetensors \(\d+ bytes\) is truncated"):
        SafetensorsFormat(PluginOptions()).open(files(path))


def test_a_directory_without_config_is_refused(tmp_path: Path, weight_format: SafetensorsFormat) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        weight_format.config(files(tmp_path))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        weight_format.config(files(tmp_path))


def test_pickled_weights_are_refused_with_the_way_to_convert_them(
    tmp_path: Path, weight_format: SafetensorsFormat
) -> None:
    write_json(tmp_path / "config.json", CONFIG)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert SafetensorsFormat.recognizes(files(tmp_path))
    for use in (weight_format.config, weight_format.open):
        with pytest.raises(ModelError, match=r"pickles only \(pytorch_model\.bin\).*save_pretrained"):
            use(files(tmp_path))


def test_recognition(single: Path, tmp_path: Path) -> None:
    assert SafetensorsFormat.recognizes(files(single))
    assert SafetensorsFormat.recognizes(files(single / "model.safetensors"))
    assert not SafetensorsFormat.recognizes(files(single / "config.json"))
    (single / "m.gguf").touch()
    assert SafetensorsFormat.recognizes(files(single))
    (single / "model.safetensors").unlink()
    assert not SafetensorsFormat.recognizes(files(single))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert not SafetensorsFormat.recognizes(files(empty))


def test_a_tokenizer_is_given_where_its_files_are(single: Path, weight_format: SafetensorsFormat) -> None:
    assert weight_format.tokenizer(files(single)) is None
    (single / "tokenizer.json").write_text("{}")
    found = weight_format.tokenizer(files(single))
    assert found is not None
    assert found.directory == single


def test_what_transformers_saves(weight_format: SafetensorsFormat, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, tiny_config("llama", eos_token_id=2))
    GenerationConfig(eos_token_id=2).save_pretrained(tmp_path)
    config = weight_format.config(files(tmp_path))
    assert config["generation_config"]["eos_token_id"] == 2
    embeddings = weight_format.open(files(tmp_path)).read("model.embed_tokens.weight")
    assert torch.equal(embeddings, model.get_input_embeddings().weight)
