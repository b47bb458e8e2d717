"""AWQ and GPTQ checkpoints: read, held and multiplied. The oracle takes each weight apart by the formulas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.quantization import LinearShape, QuantizationNeed
from dovetail.contracts.weights import ModelFiles, PackedTensor
from dovetail.plugins.quantization.int4.method import Int4Linear, Int4Method
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat
from dovetail.testing.tiny_models import read_config, read_weights, save_tiny_model, tiny_config

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Layer = dict[str, torch.Tensor]


def pack_bits(values: list[int]) -> int:
    """Eight nibbles as a signed 32-bit word, the first lowest."""
    word = sum(value << (4 * place) for place, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def random_groups(out_features: int, in_features: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [out, in], z [out, groups] in 1 .. 15, s [out, groups]."""
    generator = torch.Generator().manual_seed(seed)
    groups = in_features // GROUP
    q = torch.randint(0, 16, (out_features, in_features), generator=generator)
    z = torch.randint(1, 16, (out_features, groups), generator=generator)
    s = (torch.rand(out_features, groups, generator=generator) * 0.02 + 0.002).half()
    return q, z, s


def numbers(q: torch.Tensor, z: torch.Tensor, s: torch.Tensor, index: list[int]) -> torch.Tensor:
    """w = (q - z) s, one by one."""
    w = torch.empty(q.shape)
    for row in range(q.shape[0]):
        for column in range(q.shape[1]):
            group = index[column]
            w[row, column] = (int(q[row, column]) - int(z[row, group])) * float(s[row, group])
    return w


def awq(q: torch.Tensor, z: torch.Tensor, s: torch.Tensor) -> Layer:
    def words(values: torch.Tensor) -> torch.Tensor:  # [r, out] -> int32 [r, out / 8]
        rows = [
            [pack_bits([int(row[c + place]) for place in AWQ_ORDER]) for c in range(0, len(row), 8)] for row in values
        ]
        return torch.tensor(rows, dtype=torch.int32)

    return {"qweight": words(q.T), "qzeros": words(z.T), "scales": s.T.contiguous()}


def gptq(q: torch.Tensor, z: torch.Tensor, s: torch.Tensor, index: list[int], offset: int = 1) -> Layer:
    columns = q.T.tolist()
    weights = [
        [pack_bits([columns[r + i][c] for i in range(8)]) for c in range(len(q))] for r in range(0, len(columns), 8)
    ]
    stored = (z - offset).T.tolist()
    zeros = [[pack_bits(row[c : c + 8]) for c in range(0, len(row), 8)] for row in stored]
    return {
        "qweight": torch.tensor(weights, dtype=torch.int32),
        "qzeros": torch.tensor(zeros, dtype=torch.int32),
        "scales": s.T.contiguous(),
        "g_idx": torch.tensor(index, dtype=torch.int32),
    }


def write(directory: Path, tensors: Layer, **quantization: Any) -> ModelFiles:
    config = {"quantization_config": {"bits": 4, "group_size": GROUP, **quantization}}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return ModelFiles(str(directory), directory)


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_v2", "act-order"])
def test_weights_are_what_the_formulas_say(tmp_path: Path, kind: str) -> None:
    q, z, s = random_groups(16, 96, seed=1)
    index = [column // GROUP for column in range(96)]
    if kind == "act-order":
        index = index[::-1]
    layer = awq(q, z, s) if kind == "awq" else gptq(q, z, s, index, offset=0 if kind == "gptq_v2" else 1)
    method = "awq" if kind == "awq" else "gptq"
    more = {"checkpoint_format": "gptq_v2"} if kind == "gptq_v2" else {}
    files = write(tmp_path, {f"a.b.{name}": t for name, t in layer.items()}, quant_method=method, **more)
    reader = SafetensorsFormat(PluginOptions()).open(files)
    expected = numbers(q, z, s, index)
    (info,) = reader.infos()
    assert (info.name, info.shape, info.dtype) == ("a.b.weight", (16, 96), "int4g32")
    torch.testing.assert_close(reader.read("a.b.weight"), expected, rtol=1e-6, atol=0.0)
    packed = reader.read_packed("a.b.weight")
    assert isinstance(packed, PackedTensor) == (kind != "act-order")
    if isinstance(packed, PackedTensor):
        torch.testing.assert_close(packed[4:12, 32:].dequantized(), expected[4:12, 32:], rtol=1e-6, atol=0.0)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    q, z, s = random_groups(8, 32, seed=1)
    tensors = {f"a.{name}": t for name, t in awq(q, z, s).items()}
    formats = SafetensorsFormat(PluginOptions())
    with pytest.raises(ModelError, match="8 bits"):
        formats.open(write(tmp_path, tensors, quant_method="awq", bits=8))
    with pytest.raises(ModelError, match="version 'gemv'"):
        formats.open(write(tmp_path, tensors, quant_method="awq", version="gemv"))
    del tensors["a.scales"]
    with pytest.raises(ModelError, match=r"no a\.scales"):
        formats.open(write(tmp_path, tensors, quant_method="awq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_layer_of_packed_and_plain_parts(tmp_path: Path, dtype: torch.dtype) -> None:
    q, z, s = random_groups(16, 64, seed=2)
    files = write(tmp_path, {f"a.{name}": t for name, t in awq(q, z, s).items()}, quant_method="awq")
    packed = SafetensorsFormat(PluginOptions()).open(files).read_packed("a.weight")
    plain = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    kernel = Int4Linear(LinearShape("a", 64, 40, True), torch.device("cpu"), dtype)
    kernel.load(slice(16, 24), plain)
    kernel.load(slice(0, 16), packed)
    kernel.load(slice(24, 40), packed)
    kernel.finish()
    once = numbers(q, z, s, [column // GROUP for column in range(64)])
    weight = torch.cat((once, plain, once))
    x, bias = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype), torch.ones(40, dtype=dtype)
    expected = x.double() @ weight.double().T + 1
    tolerance = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(kernel.apply(x, bias).double(), expected, rtol=0.0, atol=tolerance)
    assert len(list(kernel.tensors())) >= 6


@pytest.fixture(scope="module", params=["awq", "gptq"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the numbers that it stands for."""
    whole, packed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("packed")
    save_tiny_model(whole, tiny_config("llama", intermediate_size=64))
    weights = dict(read_weights(whole))
    tensors: Layer = {}
    for name, weight in list(weights.items()):
        if weight.dim() != 2 or "proj" not in name:
            tensors[name] = weight.contiguous()
            continue
        q, z, s = random_groups(*weight.shape, seed=len(name) + int(weight.shape[0]))
        index = [column // GROUP for column in range(weight.shape[1])]
        layer = awq(q, z, s) if request.param == "awq" else gptq(q, z, s, index)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in layer.items()}
        weights[name] = numbers(q, z, s, index)
    config = read_config(whole)
    (whole / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, whole / "model.safetensors")
    quantization = {"quant_method": request.param, "bits": 4, "group_size": GROUP}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(tensors, packed / "model.safetensors")
    return whole, packed


def test_a_quantized_model_says_what_its_numbers_say(checkpoints: tuple[Path, Path]) -> None:
    """As packed weights, chosen by auto, and as numbers."""
    whole, packed = checkpoints

    def run(path: Path, chosen: str | None, **model: Any) -> list[int]:
        sections = {"model": {"path": str(path), "tokenizer_mode": "none", **model}, "cache": {"num_blocks": 50}}
        with LLM(**sections) as llm:
            quantization = llm.engine.config.quantization
            assert (None if quantization is None else quantization.name) == chosen
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            return list(llm.generate([[5, 9, 33]], params)[0].outputs[0].token_ids)

    expected = run(whole, None, dtype="float32")
    assert run(packed, "int4") == expected
    assert run(packed, "int4", dtype="float32", quantization="int4") == expected
    assert run(packed, None, dtype="float32") == expected
    method = json.loads((packed / "config.json").read_text())["quantization_config"]["quant_method"]
    assert run(packed, "int4", quantization=method) == expected


def test_packed_weights_are_read_again_after_sleep(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """Others of the same form as well; where they come as numbers, that is refused."""
    whole, packed = checkpoints
    path = tmp_path / "model"
    shutil.copytree(packed, path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def answer(llm: LLM) -> list[int]:
        return list(llm.generate([[5, 9, 33]], params)[0].outputs[0].token_ids)

    with LLM(str(path), tokenizer_mode="none", num_gpu_blocks_override=50) as llm:
        before = answer(llm)
        llm.engine.sleep(2)
        llm.engine.wake_up()
        assert answer(llm) == before
        llm.engine.sleep(2)
        stored = load_file(path / "model.safetensors")
        save_file(
            {name: t.flip(0) if "scales" in name else t for name, t in stored.items()}, path / "model.safetensors"
        )
        llm.engine.wake_up(new_weights=True)
        changed = answer(llm)
        assert changed != before
        llm.engine.sleep(2)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(whole / file, path / file)
        with pytest.raises(ModelError, match="held as four bits in groups of 32, and come as numbers"):
            llm.engine.wake_up(new_weights=True)
    shutil.copytree(packed, path, dirs_exist_ok=True)
    with LLM(str(path), tokenizer_mode="none", num_gpu_blocks_override=50) as llm:
        assert answer(llm) == before


def test_the_name_of_a_checkpoints_format_is_no_method(checkpoints: tuple[Path, Path]) -> None:
    whole, packed = checkpoints
    method = json.loads((packed / "config.json").read_text())["quantization_config"]["quant_method"]
    other = {"awq": "gptq_marlin", "gptq": "awq_marlin"}[method]
    for path, asked, what in ((whole, method, "unquantized"), (packed, other, method)):
        with pytest.raises(ConfigError, match=f"recognized by themselves, and this checkpoint's weights are {what}"):
            LLM(str(path), tokenizer_mode="none", num_gpu_blocks_override=50, quantization=asked)


def test_refusals_say_why() -> None:
    environment = Environment("cpu", 2, 2**33)
    (reason,) = reasons_against(Int4Method, QuantizationNeed("cpu", "float32"), PluginOptions(), environment)
    assert "not packed" in reason
    need = QuantizationNeed("mps", "float64", frozenset({"int4g64"}))
    assert len(reasons_against(Int4Method, need, PluginOptions(), environment)) == 2
