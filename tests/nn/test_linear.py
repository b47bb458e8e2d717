"""Sharded and fused linear layers against plain ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.errors import ModelError, PluginError
from dovetail.contracts.model import CausalLM
from dovetail.contracts.quantization import (
    LayerSupport,
    LinearKernel,
    LinearShape,
    QuantizationCapabilities,
    QuantizationMethod,
    QuantizationNeed,
)
from dovetail.contracts.weights import PackedTensor
from dovetail.nn import (
    BuildContext,
    ColumnLinear,
    LMHead,
    MergedColumnLinear,
    ModelContext,
    PackedLinear,
    QKVLinear,
    ReplicatedLinear,
    RowLinear,
    VocabEmbedding,
    load_weights,
    native,
    plain_kernel,
)
from dovetail.nn.planning import PlannedRank
from dovetail.plugins.quantization.grouped.kernel import SOURCE
from dovetail.plugins.quantization.grouped.methods import EightBitMethod, FourBitMethod, GGUFMethod
from dovetail.plugins.quantization.int8 import Int8Method
from dovetail.testing.packed_blocks import random_blocks
from dovetail.worker.forward import compiled

HIDDEN = 12


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def rank_context(rank: int, size: int) -> ModelContext:
    communicator = PlannedRank(size)
    communicator.rank = rank
    return BuildContext(torch.float32, torch.device("cpu"), 64, "float32", communicator)


def test_column_shards_side_by_side_are_the_whole(make_context: Any) -> None:
    tensors = weights({"up.weight": (8, HIDDEN), "up.bias": (8,)})
    x = torch.randn(3, HIDDEN)
    shards = []
    for rank in range(4):
        layer = ColumnLinear(make_context(rank, 4), "up", HIDDEN, 8, bias=True)
        load_weights(layer, tensors.items())
        shards.append(layer(x))
    expected = torch.nn.functional.linear(x, tensors["up.weight"], tensors["up.bias"])
    torch.testing.assert_close(torch.cat(shards, dim=-1), expected)


def test_row_shards_summed_are_the_whole_with_the_bias_once(make_context: Any) -> None:
    tensors = weights({"down.weight": (5, HIDDEN), "down.bias": (5,)})
    x = torch.randn(3, HIDDEN)
    total = torch.zeros(3, 5)
    for rank in range(3):
        layer = RowLinear(make_context(rank, 3), "down", HIDDEN, 5, bias=True, reduce=False)
        load_weights(layer, tensors.items())
        total += layer(x[:, rank * 4 : (rank + 1) * 4])
    expected = torch.nn.functional.linear(x, tensors["down.weight"], tensors["down.bias"])
    torch.testing.assert_close(total, expected)


def test_merged_parts_stand_side_by_side(make_context: Any) -> None:
    tensors = weights({"gate.weight": (6, HIDDEN), "up.weight": (4, HIDDEN)})
    x = torch.randn(2, HIDDEN)
    layer = MergedColumnLinear(make_context(1, 2), "gate_up", HIDDEN, {"gate": 6, "up": 4})
    load_weights(layer, tensors.items())
    expected = torch.cat((x @ tensors["gate.weight"][3:].T, x @ tensors["up.weight"][2:].T), dim=-1)
    torch.testing.assert_close(layer(x), expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_each_query_head_finds_its_key_head_on_its_rank(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    kv_heads = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 12) if n % size == 0 or size % n == 0]))
    heads = kv_heads * data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if kv_heads * n % size == 0]))
    head_size = 2
    shapes = {
        "q.weight": (heads * head_size, HIDDEN),
        "k.weight": (kv_heads * head_size, HIDDEN),
        "v.weight": (kv_heads * head_size, HIDDEN),
    }
    tensors = weights(shapes)
    x = torch.randn(2, HIDDEN)
    full = {name: (x @ tensors[f"{name}.weight"].T).view(2, -1, head_size) for name in "qkv"}
    for rank in range(size):
        layer = QKVLinear(rank_context(rank, size), "qkv", HIDDEN, heads, kv_heads, head_size, ("q", "k", "v"))
        load_weights(layer, tensors.items())
        rows = layer(x).view(2, -1, head_size)
        query, key, value = rows.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        for local in range(layer.num_heads):
            head = rank * layer.num_heads + local
            local_kv, kv = local // (layer.num_heads // layer.num_kv_heads), head // (heads // kv_heads)
            torch.testing.assert_close(query[:, local], full["q"][:, head])
            torch.testing.assert_close(key[:, local_kv], full["k"][:, kv])
            torch.testing.assert_close(value[:, local_kv], full["v"][:, kv])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 3, 4), (8, 2, 3), (12, 4, 6), (7, 2, 1)])
def test_head_counts_that_do_not_divide_are_refused(make_context: Any, heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(ModelError):
        QKVLinear(make_context(0, size), "qkv", HIDDEN, heads, kv_heads, 2, ("q", "k", "v"))


def test_embedding_rows_and_logits_of_the_ranks_cover_an_odd_vocabulary(make_context: Any) -> None:
    tensors = weights({"embed.weight": (7, HIDDEN), "head.weight": (7, HIDDEN)})
    hidden, logits = torch.zeros(7, HIDDEN), []
    for rank in range(3):
        context = make_context(rank, 3)
        embedding = VocabEmbedding(context, "embed", 7, HIDDEN)
        head = LMHead(context, "head", 7, HIDDEN)
        load_weights(torch.nn.ModuleList([embedding, head]), tensors.items())
        hidden[rank * 3 : rank * 3 + 3] = embedding.weight[: len(hidden[rank * 3 : rank * 3 + 3])]
        logits.append(head.kernel.apply(torch.ones(1, HIDDEN), None))
    assert torch.equal(hidden, tensors["embed.weight"])
    gathered = torch.cat(logits, dim=-1)[:, :7]
    torch.testing.assert_close(gathered[0], tensors["head.weight"].sum(dim=1))


@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_packed_weights_give_what_torch_gives(
    make_context: Any, rows: int, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    if not PackedLinear.serves(torch.device("cpu"), dtype):
        pytest.skip(f"this CPU's oneDNN does not multiply {dtype}")
    tensors = weights({"up.weight": (32, HIDDEN)} | ({"up.bias": (32,)} if bias else {}))
    layer = ColumnLinear(make_context(dtype=dtype), "up", HIDDEN, 32, bias)
    load_weights(layer, tensors.items())
    assert isinstance(layer.kernel, PackedLinear)
    x = torch.randn(rows, HIDDEN, dtype=dtype)
    full = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    expected = torch.nn.functional.linear(x, full["up.weight"], full.get("up.bias"))
    torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's compiler imports what torch deprecates
def test_packed_weights_are_kept_from_a_compiler(make_context: Any) -> None:
    """torch.compile takes oneDNN's own layout for a constant, which it is not, and gives up."""
    if not PackedLinear.serves(torch.device("cpu"), torch.float32):
        pytest.skip("this CPU's oneDNN does not multiply float32")
    layer = ColumnLinear(make_context(), "up", HIDDEN, 8)
    load_weights(layer, weights({"up.weight": (8, HIDDEN)}).items())
    x = torch.randn(3, HIDDEN)
    expected = layer(x)
    torch.testing.assert_close(compiled(cast(CausalLM, layer), layer.forward, "default")(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_weights_are_loaded_again_into_the_same_memory(
    make_context: Any, dtype: torch.dtype, batch_invariant: bool
) -> None:
    """Plain and packed by oneDNN, a table, and an output layer that is tied to it."""

    def build() -> torch.nn.ModuleList:
        context = make_context(dtype=dtype, batch_invariant=batch_invariant)
        embedding = VocabEmbedding(context, "embed", 16, HIDDEN)
        head = LMHead(context, "head", 16, HIDDEN, embedding)
        return torch.nn.ModuleList([embedding, head, ColumnLinear(context, "up", HIDDEN, 8)])

    shapes = {"embed.weight": (16, HIDDEN), "up.weight": (8, HIDDEN)}
    x = torch.randn(2, HIDDEN).to(dtype)
    model, fresh = build(), build()
    load_weights(model, weights(shapes).items())
    places, first = [kernel_address(layer.kernel) for layer in list(model)[1:]], [layer(x) for layer in list(model)[1:]]
    changed = {name: 1 - tensor for name, tensor in weights(shapes).items()}
    for module in (model, fresh):
        load_weights(module, changed.items())
    for layer, other, old in zip(list(model)[1:], list(fresh)[1:], first, strict=True):
        assert torch.equal(layer(x), other(x))
        assert not torch.equal(layer(x), old)
    assert [kernel_address(layer.kernel) for layer in list(model)[1:]] == places


def kernel_address(kernel: LinearKernel) -> list[int]:
    """Of its weights; oneDNN's own layouts have an operator to ask."""
    return [
        tensor.data_ptr() if tensor.layout is torch.strided else torch.ops.mkldnn.data_ptr(tensor)
        for tensor in kernel.tensors()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_some_rows_of_plain_weights_are_loaded_again(dtype: torch.dtype) -> None:
    old, new = torch.randn(2, 24, HIDDEN).to(dtype)
    kernel, fresh = (plain_kernel(torch.empty(24, HIDDEN, dtype=dtype)) for _ in range(2))
    kernel.load(slice(0, 24), old)
    kernel.finish()
    places = kernel_address(kernel)
    kernel.load(slice(5, 11), new[5:11])
    kernel.finish()
    fresh.load(slice(0, 24), torch.cat((old[:5], new[5:11], old[11:])))
    fresh.finish()
    x = torch.randn(3, HIDDEN).to(dtype)
    assert torch.equal(kernel.apply(x, None), fresh.apply(x, None))
    assert kernel_address(kernel) == places


class WholeLayers(Int8Method):
    """Kernels that take all rows of a layer or none."""

    capabilities = replace(Int8Method.capabilities, reloads_rows=False)


@pytest.mark.parametrize("method", [Int8Method, WholeLayers])
def test_one_part_of_a_fused_layer_is_loaded_again(make_context: Any, method: type[Int8Method]) -> None:
    """Where the kernel takes some rows; otherwise that is refused, and the layer stays as it is."""
    made = method(method.Options(), QuantizationNeed("cpu", "bfloat16"))
    context = make_context(quantization=made, dtype=torch.bfloat16)
    layer = MergedColumnLinear(context, "mlp.gate_up", HIDDEN, {"gate": 6, "up": 6})
    load_weights(layer, weights({"gate.weight": (6, HIDDEN), "up.weight": (6, HIDDEN)}).items())
    x = torch.randn(3, HIDDEN).bfloat16()
    before = layer(x)
    layer.finish()  # none of its weights was given
    assert torch.equal(layer(x), before)
    if not method.capabilities.reloads_rows:
        layer.load("up.weight", torch.zeros(6, HIDDEN))
        with pytest.raises(ModelError, match=r"up\.weight cannot be loaded without gate\.weight"):
            layer.finish()
        return
    layer.load("up.weight", torch.zeros(6, HIDDEN))
    layer.finish()
    assert torch.equal(layer(x)[:, :6], before[:, :6])
    assert not layer(x)[:, 6:].any()


@pytest.mark.skipif(bool(native.reasons_against(SOURCE)), reason="no C compiler")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method_class", [EightBitMethod, FourBitMethod, GGUFMethod, Int8Method])
def test_shards_are_loaded_again(make_context: Any, method_class: type[QuantizationMethod], rank: int) -> None:
    """Rows and columns of one rank of two; packed blocks are cut at the edges of blocks."""
    need = QuantizationNeed("cpu", "bfloat16", frozenset({"Q4_1"}) if method_class is GGUFMethod else frozenset())

    def build() -> torch.nn.ModuleList:
        quantization = method_class(method_class.Options(), need)
        context = make_context(rank, 2, dtype=torch.bfloat16, quantization=quantization)
        heads = QKVLinear(context, "qkv", 64, 4, 2, 16, ("q", "k", "v"))
        return torch.nn.ModuleList([heads, RowLinear(context, "down", 128, 20)])

    def checkpoint(seed: int) -> dict[str, torch.Tensor | PackedTensor]:
        shapes = {"q.weight": (64, 64), "k.weight": (32, 64), "v.weight": (32, 64), "down.weight": (20, 128)}
        if method_class is GGUFMethod:
            return {name: random_blocks("Q4_1", rows, size // 32, seed) for name, (rows, size) in shapes.items()}
        return {name: tensor * seed - 1 for name, tensor in weights(shapes).items()}

    model, fresh = build(), build()
    load_weights(model, checkpoint(1).items())
    places = [address for layer in model for address in kernel_address(layer.kernel)]
    for module in (model, fresh):
        load_weights(module, checkpoint(2).items())
    for layer, other, size in zip(model, fresh, (64, 64), strict=True):
        x = torch.randn(3, size).bfloat16()
        assert torch.equal(layer.kernel.apply(x, None), other.kernel.apply(x, None))
    assert [address for layer in model for address in kernel_address(layer.kernel)] == places


class RecordingMethod:
    """Stands for a quantization method that declines every layer: notes what it is asked."""

    capabilities = QuantizationCapabilities()

    def __init__(self) -> None:
        self.shapes: list[LinearShape] = []

    def describe(self, shape: LinearShape) -> LayerSupport:
        self.shapes.append(shape)
        return LayerSupport()


def test_the_quantization_method_is_asked_with_local_sizes_but_not_for_routers(make_context: Any) -> None:
    method = RecordingMethod()
    context = make_context(0, 2, quantization=method)
    MergedColumnLinear(context, "mlp.gate_up", HIDDEN, {"gate": 6, "up": 6}, bias=True)
    RowLinear(context, "mlp.down", 6, HIDDEN)
    ReplicatedLinear(context, "mlp.router", HIDDEN, 4)
    assert method.shapes == [
        LinearShape("mlp.gate_up", HIDDEN, 6, has_bias=True),
        LinearShape("mlp.down", 3, HIDDEN, has_bias=False),
    ]


def test_a_table_must_look_up_rows(make_context: Any) -> None:
    class NoTables(Int8Method):
        capabilities = replace(Int8Method.capabilities, embeddings=True)

    method = NoTables(NoTables.Options(), QuantizationNeed("cpu", "bfloat16"))
    with pytest.raises(PluginError, match=r"NoTables declares embeddings.*embed is no LooksUpRows"):
        VocabEmbedding(make_context(quantization=method), "embed", 16, HIDDEN)
