"""Tensors of GGUF files: every type, against gguf's own dequantization."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles
from dovetail.plugins.weight_formats.gguf import GGUFFormat

NAME, GGUF_NAME = "model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"
PLAIN = {Quant.F32: torch.float32, Quant.F16: torch.float16, Quant.BF16: torch.bfloat16}
QUANTIZABLE = [Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0, Quant.TQ1_0, Quant.TQ2_0]
ONLY_DEQUANTIZABLE = [
    *(Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ2_XXS, Quant.IQ2_XS, Quant.IQ2_S),
    *(Quant.IQ3_XXS, Quant.IQ3_S, Quant.IQ1_S, Quant.IQ1_M, Quant.IQ4_NL, Quant.IQ4_XS),
]


def random_matrix(rows: int = 12, columns: int = 512) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)


def random_blocks(type_: Quant, rows: int = 3, columns: int = 512) -> np.ndarray:
    """Bytes that decode to finite numbers: the scales of every block type are small positive halves."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(type_.value).integers(0, 60, (rows, columns // block * block_bytes), dtype=np.uint8)
    return raw


@pytest.mark.parametrize("type_", PLAIN)
def test_unpacked_types_keep_their_dtype_and_bits(type_: Quant, tiny_model: Any, gguf_format: GGUFFormat) -> None:
    matrix = random_matrix()
    reader = gguf_format.open(tiny_model({GGUF_NAME: (matrix, type_)}))
    tensor = reader.read(NAME)
    assert tensor.dtype == PLAIN[type_]
    torch.testing.assert_close(tensor, torch.from_numpy(matrix).to(PLAIN[type_]), rtol=0, atol=0)
    info = {info.name: info for info in reader.infos()}[NAME]
    assert (info.shape, info.dtype) == ((12, 512), str(PLAIN[type_]).removeprefix("torch."))
    assert info.num_bytes == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("type_", QUANTIZABLE)
def test_packed_types_come_out_as_the_library_unpacks_them(
    type_: Quant, tiny_model: Any, gguf_format: GGUFFormat
) -> None:
    matrix = random_matrix()
    reader = gguf_format.open(tiny_model({GGUF_NAME: (matrix, type_)}))
    expected = gguf.quants.dequantize(gguf.quants.quantize(matrix, type_), type_)
    assert np.array_equal(reader.read(NAME).numpy(), expected)
    info = {info.name: info for info in reader.infos()}[NAME]
    assert (info.shape, info.dtype) == ((12, 512), type_.name)


@pytest.mark.parametrize("type_", ONLY_DEQUANTIZABLE)
def test_types_that_only_llama_cpp_packs(type_: Quant, tiny_model: Any, gguf_format: GGUFFormat) -> None:
    raw = random_blocks(type_)
    reader = gguf_format.open(tiny_model({GGUF_NAME: (raw, type_)}))
    expected = gguf.quants.dequantize(raw, type_)
    assert np.isfinite(expected).all()
    assert np.array_equal(reader.read(NAME).numpy(), expected)


def test_a_type_that_cannot_be_unpacked_is_refused_at_open(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    files = tiny_model({GGUF_NAME: (np.zeros((1, 292), np.uint8), Quant.Q8_K)})
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_gate\.weight' has type Q8_K"):
        gguf_format.open(files)


def test_rotary_rows_are_put_back_also_where_they_are_packed(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    original = random_matrix(rows=256, columns=256)
    # What llama.cpp's converter does, in its own words: reshape to (heads, 2, half), swap, flatten.
    permuted = original.reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(256, 256)
    reader = gguf_format.open(tiny_model({"blk.0.attn_q.weight": (permuted, Quant.Q8_0)}))
    expected = gguf.quants.dequantize(gguf.quants.quantize(original, Quant.Q8_0), Quant.Q8_0)
    assert np.array_equal(reader.read("model.layers.0.self_attn.q_proj.weight").numpy(), expected)


def test_stacked_experts_are_read_one_by_one(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    stacked = random_matrix(rows=3 * 8, columns=256).reshape(3, 8, 256)
    files = tiny_model({"blk.0.ffn_up_exps.weight": (stacked, Quant.Q4_0)}, {"expert_count": 3, "expert_used_count": 2})
    reader = gguf_format.open(files)
    for expert in range(3):
        expected = gguf.quants.dequantize(gguf.quants.quantize(stacked[expert], Quant.Q4_0), Quant.Q4_0)
        tensor = reader.read(f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight")
        assert np.array_equal(tensor.numpy(), expected)


def test_tensors_outlive_the_reader(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    reader = gguf_format.open(tiny_model())
    tensor = reader.read("model.embed_tokens.weight")
    reader.close()
    reader.close()
    assert tensor[7, 255] == 8 * 256 - 1


def test_a_model_split_over_files_is_read_as_one(
    tmp_path: Path, write_gguf: Callable[..., ModelFiles], tiny_values: Any, gguf_format: GGUFFormat
) -> None:
    first = {"token_embd.weight": (random_matrix(8, 256), Quant.F32)}
    second = {"output_norm.weight": (np.ones(256, np.float32), Quant.F32)}
    files = write_gguf(tmp_path / "m-00001-of-00002.gguf", "llama", {**tiny_values, "split.count": 2}, first)
    with pytest.raises(ModelError, match=r"lacks 1 of 2 parts of the model: m-00002-of-00002\.gguf"):
        gguf_format.open(files)
    write_gguf(tmp_path / "m-00002-of-00002.gguf", "llama", {"split.count": 2}, second)
    gguf_format = GGUFFormat(gguf_format.options)
    for path in (files.path, tmp_path):
        names = [name for name, _ in gguf_format.open(ModelFiles("m", path)).tensors()]
        assert names == ["model.embed_tokens.weight", "model.norm.weight"]


@pytest.fixture(scope="module")
def whole_file(
    tmp_path_factory: pytest.TempPathFactory, write_gguf: Callable[..., ModelFiles], tiny_values: Any
) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "whole.gguf"
    values = {
        **tiny_values,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(8)],
        "tokenizer.ggml.token_type": [1] * 8,
        "tokenizer.ggml.merges": ["t 1"],
    }
    write_gguf(path, "llama", values, {"token_embd.weight": (random_matrix(8, 256), Quant.Q4_0)})
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_is_a_model_error(
    data: st.DataObject, whole_file: bytes, tmp_path_factory: pytest.TempPathFactory, gguf_format: GGUFFormat
) -> None:
    size = data.draw(st.integers(0, len(whole_file) - 1))
    path = tmp_path_factory.getbasetemp() / f"cut-{size}.gguf"
    path.write_bytes(whole_file[:size])
    files = ModelFiles("cut", path)
    assert GGUFFormat.recognizes(files)
    for use in (gguf_format.config, gguf_format.tokenizer, gguf_format.open):
        with pytest.raises(ModelError, match=str(path)):
            use(files)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 600), value=st.integers(0, 255))
def test_a_wrong_byte_in_the_header_is_at_worst_a_model_error(
    position: int, value: int, whole_file: bytes, tmp_path_factory: pytest.TempPathFactory, gguf_format: GGUFFormat
) -> None:
    path = tmp_path_factory.getbasetemp() / f"wrong-{position}-{value}.gguf"
    path.write_bytes(whole_file[:position] + bytes([value]) + whole_file[position + 1 :])
    for use in (gguf_format.config, gguf_format.tokenizer, gguf_format.open):
        message = failure(use, ModelFiles("wrong", path))
        assert message is None or str(path) in message


def failure(use: Callable[[ModelFiles], object], files: ModelFiles) -> str | None:
    """What the `ModelError` says; None if all went well. Any other error passes through."""
    try:
        use(files)
    except ModelError as error:
        return str(error)
    return None


def test_truncated_data_says_what_was_expected(whole_file: bytes, tmp_path: Path, gguf_format: GGUFFormat) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole_file[:-100])
    with pytest.raises(ModelError) as caught:
        gguf_format.open(ModelFiles("cut", path))
    assert "token_embd.weight" in str(caught.value)
    assert f"the file has {len(whole_file) - 100} bytes" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with b''"),
        (b"PK\x03\x04" + bytes(100), r"is not a GGUF file: it starts with b'PK"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "has GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "truncated or malformed"),
    ],
)
def test_foreign_files(content: bytes, message: str, tmp_path: Path, gguf_format: GGUFFormat) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        gguf_format.config(ModelFiles("foreign", path))


def test_recognition_is_by_magic_name_or_directory(tmp_path: Path, whole_file: bytes) -> None:
    (tmp_path / "blob").write_bytes(whole_file)
    (tmp_path / "text").write_text("hello")
    assert GGUFFormat.recognizes(ModelFiles("", tmp_path / "blob"))
    assert not GGUFFormat.recognizes(ModelFiles("", tmp_path / "text"))
    assert not GGUFFormat.recognizes(ModelFiles("", tmp_path / "absent"))
    assert not GGUFFormat.recognizes(ModelFiles("", tmp_path))
    (tmp_path / "one.gguf").write_bytes(whole_file)
    assert GGUFFormat.recognizes(ModelFiles("", tmp_path))


def test_a_directory_with_several_models_is_refused(tmp_path: Path, gguf_format: GGUFFormat) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"found a\.gguf, b\.gguf: give the path of the file"):
        gguf_format.config(ModelFiles("", tmp_path))
