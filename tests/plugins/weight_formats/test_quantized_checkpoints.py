"""Checkpoints that other libraries quantized: fp8, compressed-tensors, bitsandbytes, MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weights import ModelFiles, PackedTensor, WeightReader
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

Tensors = dict[str, torch.Tensor]
STORED = Path(__file__).with_name("quantized")
"""Layers and their values as the libraries themselves gave them: see make.py there."""
FILES = sorted(path.stem for path in STORED.glob("*.safetensors"))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def checkpoint(directory: Path, tensors: Tensors, quantization: dict[str, Any], **config: Any) -> ModelFiles:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return ModelFiles(str(directory), directory)


def opened(files: ModelFiles) -> WeightReader:
    return SafetensorsFormat(PluginOptions()).open(files)


@pytest.mark.parametrize("name", FILES)
def test_values_are_those_of_the_library_that_wrote_them(tmp_path: Path, name: str) -> None:
    with safe_open(STORED / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        quantization = json.loads(file.metadata()["quantization_config"])
    expected = tensors.pop("expected")
    reader = opened(checkpoint(tmp_path, tensors, quantization))
    (info,) = reader.infos()
    assert (info.name, info.shape) == ("a.weight", tuple(expected.shape))
    # The libraries round their own products to the dtypes that they work in.
    tolerance = 1e-3 if name in ("bnb-int8", "bnb-nf4-nested") else 1e-6
    torch.testing.assert_close(reader.read("a.weight"), expected, rtol=tolerance, atol=tolerance * 1e-3)
    packed = reader.read_packed("a.weight")
    assert isinstance(packed, PackedTensor) == name.startswith("ct-int4")
    if isinstance(packed, PackedTensor):
        assert reader.packed_formats() == {packed.format}
        torch.testing.assert_close(packed.dequantized(), expected, rtol=1e-6, atol=0)


def quantized_by_blocks(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 numbers, and float32 scales [ceil(rows / block), ceil(columns / block)], as DeepSeek-V3 publishes them."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block), -(-columns // block))
    numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[part].abs().max() / 448
            numbers[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return numbers, scales


@pytest.mark.parametrize(("rows", "columns"), [(64, 96), (50, 33)])
def test_blocks_of_fp8(tmp_path: Path, rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    numbers, scales = quantized_by_blocks(weight, 32)
    tensors = {"a.weight": numbers, "a.weight_scale_inv": scales, "b.weight": weight}
    reader = opened(checkpoint(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]}))
    read = reader.read("a.weight")
    for i in range(rows):
        expected = numbers[i].float() * scales[i // 32, torch.arange(columns) // 32]
        torch.testing.assert_close(read[i], expected, rtol=0, atol=0)
    assert torch.equal(reader.read("b.weight"), weight)
    assert [info.name for info in reader.infos()] == ["b.weight", "a.weight"]


def test_mxfp4_is_what_transformers_reads(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 8, 2), generator=draw, dtype=torch.uint8)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    reader = opened(checkpoint(tmp_path, tensors, {"quant_method": "mxfp4"}))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert reader.infos()[0].shape == tuple(expected.shape) == (3, 64, 8)
    assert torch.equal(reader.read("experts.down_proj"), expected)


@pytest.mark.parametrize(
    ("tensors", "quantization", "words"),
    [
        (
            {"a.weight_packed": torch.zeros(2, 4, dtype=torch.int32)},
            {"format": "pack-quantized"},
            r"no a\.weight_scale",
        ),
        ({}, {"format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized cannot be read"),
        ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, tensors: Tensors, quantization: dict[str, Any], words: str
) -> None:
    files = checkpoint(
        tmp_path, tensors | {"b.weight": torch.ones(2, 2)}, {"quant_method": "compressed-tensors"} | quantization
    )
    with pytest.raises(ModelError, match=words):
        opened(files)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(3, 1)}
    reader = opened(checkpoint(tmp_path, tensors, {"quant_method": "fp8"}))
    with pytest.raises(ModelError, match=r"a\.weight_scale has shape \[3, 1\], which does not fit .* \[8, 8\]"):
        reader.read("a.weight")


def tokens(directory: Path) -> list[list[int]]:
    with LLM(
        model={"path": str(directory), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 80},
        cache={"block_size": 4, "num_blocks": 60},
        executor={"threads": 1},
    ) as llm:
        prompts = [list(range(3, 20)), list(range(40, 49))]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def test_an_fp8_checkpoint_generates_as_its_values_do(tmp_path: Path) -> None:
    hf = save_tiny_model(tmp_path / "plain", tiny_config("llama"))
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    plain: Tensors = {}
    stored: Tensors = {}
    for name, tensor in hf.state_dict().items():
        if name.endswith("proj.weight"):
            numbers, scales = quantized_by_blocks(tensor, 32)
            stored |= {name: numbers, f"{name}_scale_inv": scales}
            spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
            plain[name] = numbers.float() * spread[: len(tensor), : tensor.shape[1]]
        elif "lm_head" not in name or not config.get("tie_word_embeddings"):
            stored[name] = plain[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, tmp_path / "plain" / "model.safetensors")
    checkpoint(tmp_path / "fp8", stored, {"quant_method": "fp8", "weight_block_size": [32, 32]}, **config)
    assert tokens(tmp_path / "fp8") == tokens(tmp_path / "plain")


def test_gpt_oss_in_mxfp4_generates_as_its_values_do(tmp_path: Path) -> None:
    config = tiny_config(
        "gpt_oss", num_local_experts=4, head_dim=16, sliding_window=12, initializer_range=0.5, intermediate_size=64
    )
    hf = save_tiny_model(tmp_path / "plain", config)
    written = json.loads((tmp_path / "plain" / "config.json").read_text())
    draw = torch.Generator().manual_seed(3)
    stored: Tensors = {}
    for name, tensor in hf.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        stored[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), generator=draw, dtype=torch.uint8
        )
        stored[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 124, dtype=torch.uint8)
    files = checkpoint(tmp_path / "mxfp4", stored, {"quant_method": "mxfp4"}, **written)
    reader = opened(files)
    values = {info.name: reader.read(info.name).contiguous() for info in reader.infos()}
    save_file(values, tmp_path / "plain" / "model.safetensors")
    assert tokens(tmp_path / "mxfp4") == tokens(tmp_path / "plain")
