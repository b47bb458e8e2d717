"""Packed tensors of GGUF files: the blocks stand for what `read` gives, whole and in part."""

from __future__ import annotations

import pickle
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import PackedTensor
from dovetail.plugins.weight_formats.gguf import GGUFFormat

NAME, GGUF_NAME = "model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"
QUANTIZABLE = [Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0, Quant.TQ1_0, Quant.TQ2_0]
ONLY_DEQUANTIZABLE = [Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_NL, Quant.IQ4_XS]


def matrix(rows: int = 6, columns: int = 1024) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)


def packed(reader: Any, name: str = NAME) -> PackedTensor:
    found = reader.read_packed(name)
    assert isinstance(found, PackedTensor)
    return found


@pytest.mark.parametrize("type_", [*QUANTIZABLE, *ONLY_DEQUANTIZABLE])
def test_blocks_stand_for_the_tensor(type_: Quant, tiny_model: Any, gguf_format: GGUFFormat) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    data = matrix()
    if type_ in ONLY_DEQUANTIZABLE:
        data = np.random.default_rng(1).integers(0, 60, (6, 1024 // block * block_bytes), dtype=np.uint8)
    reader = gguf_format.open(tiny_model({GGUF_NAME: (data, type_)}))
    tensor = packed(reader)
    assert torch.equal(tensor.dequantized(), reader.read(NAME))
    assert (tensor.format, tensor.shape) == (type_.name, (6, 1024))
    assert (tensor.block_size, tensor.block_bytes) == (block, block_bytes)
    assert tensor.blocks.shape == (6, 1024 // block * block_bytes)
    assert reader.packed_formats() == {type_.name}


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory, write_gguf: Any, tiny_values: Any) -> dict[Quant, Any]:
    folder = tmp_path_factory.mktemp("packed")
    embeddings = {"token_embd.weight": (matrix(8, 256), Quant.F32)}
    return {
        type_: GGUFFormat(GGUFFormat.Options()).open(
            write_gguf(
                folder / f"{type_.name}.gguf", "llama", tiny_values, {**embeddings, GGUF_NAME: (matrix(), type_)}
            )
        )
        for type_ in QUANTIZABLE
    }


@settings(max_examples=100, deadline=None)
@given(data=st.data(), type_=st.sampled_from(QUANTIZABLE))
def test_slicing_commutes_with_dequantization(data: st.DataObject, type_: Quant, readers: Any) -> None:
    tensor = packed(readers[type_])
    num_blocks = 1024 // tensor.block_size
    rows = data.draw(st.slices(6).filter(lambda rows: rows.step is None or rows.step > 0))
    first, last = sorted(data.draw(st.tuples(st.integers(0, num_blocks), st.integers(0, num_blocks))))
    columns = slice(first * tensor.block_size, last * tensor.block_size)
    part = tensor[rows, columns]
    expected = readers[type_].read(NAME)[rows, columns]
    assert part.shape == tuple(expected.shape)
    assert torch.equal(part.dequantized(), expected)
    assert torch.equal(tensor[rows].dequantized(), tensor.dequantized()[rows])
    again = data.draw(st.slices(max(1, len(expected))).filter(lambda rows: rows.step is None or rows.step > 0))
    assert torch.equal(part[again].dequantized(), expected[again])


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 1024), stop=st.integers(0, 1024))
def test_columns_that_cut_a_block_are_refused(start: int, stop: int, readers: Any) -> None:
    tensor = packed(readers[Quant.Q4_1])
    columns = slice(start, stop)
    if stop <= start or start % 32 == stop % 32 == 0:
        assert tensor.on_blocks(columns)
        assert tensor[:, columns].shape[1] == max(0, stop - start)
        return
    assert not tensor.on_blocks(columns)
    with pytest.raises(ModelError, match=f"columns {start} to {stop} cut through Q4_1 blocks of 32 weights"):
        tensor[:, columns]


def test_blocks_are_a_view_and_travel(readers: Any) -> None:
    tensor = packed(readers[Quant.Q8_0])
    assert tensor[2:4, 32:64].blocks.untyped_storage().data_ptr() == tensor.blocks.untyped_storage().data_ptr()
    again = pickle.loads(pickle.dumps(tensor[2:4]))
    assert torch.equal(again.dequantized(), tensor.dequantized()[2:4])


def test_rotary_rows_are_put_back(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    original = matrix(rows=256, columns=256)
    # What llama.cpp's converter does, in its own words: reshape to (heads, 2, half), swap, flatten.
    permuted = original.reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(256, 256)
    reader = gguf_format.open(tiny_model({"blk.0.attn_q.weight": (permuted, Quant.Q4_1)}))
    expected = gguf.quants.dequantize(gguf.quants.quantize(original, Quant.Q4_1), Quant.Q4_1)
    tensor = packed(reader, "model.layers.0.self_attn.q_proj.weight")
    assert np.array_equal(tensor.dequantized().numpy(), expected)


def test_each_expert_has_its_own_blocks(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    stacked = matrix(rows=3 * 8, columns=256).reshape(3, 8, 256)
    files = tiny_model({"blk.0.ffn_up_exps.weight": (stacked, Quant.Q4_0)}, {"expert_count": 3, "expert_used_count": 2})
    reader = gguf_format.open(files)
    for expert in range(3):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"
        assert torch.equal(packed(reader, name).dequantized(), reader.read(name))


def test_what_has_no_blocks_or_an_offset_is_read_plainly(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    norm = {"blk.0.attn_norm.weight": (matrix(rows=1, columns=256), Quant.Q8_0)}
    reader = gguf_format.open(tiny_model(norm, architecture="gemma2"))
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
        found = reader.read_packed(name)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, reader.read(name))
    assert reader.packed_formats() == frozenset()


def test_only_the_formats_that_the_caller_holds_come_packed(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    tensors = {GGUF_NAME: (matrix(), Quant.Q4_1), "blk.0.ffn_up.weight": (matrix(), Quant.Q8_0)}
    reader = gguf_format.open(tiny_model(tensors))
    assert reader.packed_formats() == {"Q4_1", "Q8_0"}
    found = dict(reader.tensors(frozenset({"Q4_1", "float32"})))
    assert [name for name, tensor in found.items() if isinstance(tensor, PackedTensor)] == [NAME]
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], reader.read("model.layers.0.mlp.up_proj.weight"))
    assert not any(isinstance(tensor, PackedTensor) for _, tensor in reader.tensors())


def test_the_files_are_those_that_hold_tensors(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    files = tiny_model()
    assert list(gguf_format.open(files).files()) == [files.path]
