"""Norms, feed-forward blocks, mixtures of experts, the attention layer, and loading."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import dovetail.nn
from dovetail.contracts.attention import AttentionSetup
from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import PluginOptions
from dovetail.nn import (
    Attention,
    BuildContext,
    GatedMLP,
    OffsetRMSNorm,
    RMSNorm,
    RopeSpec,
    RotaryEmbedding,
    SingleProcess,
    SparseMoE,
    SparseShape,
    WeightRules,
    activation,
    expected_shapes,
    load_weights,
    num_parameters,
)
from dovetail.nn.operators import TorchOperators
from dovetail.testing.attention_cases import make_batch
from dovetail.testing.draft_pages import BLOCK_SIZE
from dovetail.testing.plain_attention import PlainAttention


def random_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(module).items()
    return {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes}


@pytest.mark.parametrize(("ours", "theirs"), [(RMSNorm, LlamaRMSNorm), (OffsetRMSNorm, Gemma2RMSNorm)])
def test_norms_are_bit_for_bit_those_of_transformers(make_context: Any, ours: Any, theirs: Any) -> None:
    weight, x = torch.randn(24), torch.randn(5, 24)
    norm, oracle = ours(make_context(), "norm", 24, 1e-5), theirs(24, 1e-5)
    load_weights(norm, [("norm.weight", weight)])
    oracle.weight.data.copy_(weight)
    assert torch.equal(norm(x), oracle(x))


def test_the_offset_norm_multiplies_in_float32(make_context: Any) -> None:
    weight, x = torch.randn(24), torch.randn(5, 24).bfloat16()
    norm, oracle = OffsetRMSNorm(make_context(dtype=torch.bfloat16), "norm", 24, 1e-5), Gemma2RMSNorm(24, 1e-5)
    load_weights(norm, [("norm.weight", weight)])
    oracle.weight.data.copy_(weight)
    assert torch.equal(norm(x), oracle(x))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
def test_activations_are_those_of_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.randn(50)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ModelError, match="'sine' is not known here; known are silu"):
        activation("sine")


def brute_force_moe(weights: dict[str, torch.Tensor], x: torch.Tensor, shape: SparseShape) -> torch.Tensor:
    """One token and one expert at a time, as the papers write it."""

    def mlp(name: str, token: torch.Tensor) -> torch.Tensor:
        gate, up = weights[f"{name}.gate_proj.weight"] @ token, weights[f"{name}.up_proj.weight"] @ token
        return weights[f"{name}.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    rows = []
    for token in x:
        probabilities = torch.softmax(weights["moe.gate.weight"] @ token, dim=0)
        chosen = sorted(range(shape.num_experts), key=lambda e: -probabilities[e])[: shape.top_k]
        total = sum(probabilities[e] for e in chosen) if shape.normalize else 1.0
        row = sum((probabilities[e] / total * mlp(f"moe.experts.{e}", token) for e in chosen), torch.zeros(len(token)))
        if shape.shared_intermediate_size:
            row = row + torch.sigmoid(weights["moe.shared_expert_gate.weight"] @ token) * mlp(
                "moe.shared_expert", token
            )
        rows.append(row)
    return torch.stack(rows)


@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(1, 9),
    num_experts=st.integers(1, 6),
    top_k=st.integers(1, 6),
    normalize=st.booleans(),
    shared=st.sampled_from([0, 10]),
)
def test_sparse_experts_equal_a_loop_over_tokens(
    num_tokens: int, num_experts: int, top_k: int, normalize: bool, shared: int
) -> None:
    shape = SparseShape(
        hidden_size=8,
        intermediate_size=6,
        num_experts=num_experts,
        top_k=min(top_k, num_experts),
        normalize=normalize,
        hidden_act="silu",
        shared_intermediate_size=shared,
    )
    moe = SparseMoE(BuildContext(torch.float32, torch.device("cpu"), 64, "float32"), "moe", shape)
    weights = random_weights(moe)
    load_weights(moe, weights.items())
    x = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(num_tokens))
    torch.testing.assert_close(moe(x), brute_force_moe(weights, x, shape))


class RoutedMoE(SparseMoE):
    """Sends tokens where it is told to: a router's own sums depend on the order of its experts."""

    routes: tuple[torch.Tensor, torch.Tensor]

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.routes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_over_experts_does_not_depend_on_their_numbers(dtype: torch.dtype) -> None:
    """Bit for bit: contributions are added in the order of the token's choice, and rounded once."""
    shape = SparseShape(hidden_size=32, intermediate_size=16, num_experts=6, top_k=4, normalize=True, hidden_act="silu")
    context = BuildContext(dtype, torch.device("cpu"), 64, "float32")
    weights = random_weights(SparseMoE(context, "moe", shape))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 32, generator=generator).to(dtype)
    shares, chosen = torch.rand(9, 6, generator=generator).topk(4)
    outputs = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        moe = RoutedMoE(context, "moe", shape)
        moe.routes = shares.to(dtype), torch.tensor(order)[chosen]
        renamed = {
            f"moe.experts.{order[old]}.{part}": weights[f"moe.experts.{old}.{part}"]
            for old in range(6)
            for part in ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        }
        load_weights(moe, (renamed | {"moe.gate.weight": weights["moe.gate.weight"]}).items())
        outputs.append(moe(x))
    assert torch.equal(*outputs)


class TwoSums(SingleProcess):
    """Rank 0 of 2, whose partner computes the same and adds nothing."""

    size = 2

    def __init__(self) -> None:
        self.num_sums = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return tensor


def test_a_sparse_block_reduces_over_ranks_once() -> None:
    communicator = TwoSums()
    context = BuildContext(torch.float32, torch.device("cpu"), 64, "float32", communicator)
    moe = SparseMoE(
        context,
        "moe",
        SparseShape(
            hidden_size=8,
            intermediate_size=6,
            num_experts=4,
            top_k=2,
            normalize=True,
            hidden_act="silu",
            shared_intermediate_size=4,
        ),
    )
    load_weights(moe, random_weights(moe).items())
    moe(torch.randn(3, 8))
    assert communicator.num_sums == 1


def test_attention_layers_are_numbered_as_they_are_made_and_demand_a_backend(make_context: Any) -> None:
    context = make_context(max_model_len=32)
    layers = [Attention(context, 4, 2, 8, 0.5, window=window) for window in (None, 8, 32)]
    assert context.attention_layers == layers
    assert [attention.layer.layer_id for attention in layers] == [0, 1, 2]
    assert [attention.cache.window for attention in layers] == [None, 8, None]
    with pytest.raises(RuntimeError, match="call bind"):
        layers[0](torch.zeros(1, 32), torch.zeros(1, 16), torch.zeros(1, 16))


class CountedRotations(TorchOperators):
    """The default set, which notes what it is asked to rotate."""

    def __init__(self) -> None:
        super().__init__(PluginOptions())
        self.rotated: list[list[int]] = []

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        self.rotated.append(list(heads.shape))
        return super().rotate(heads, cos, sin)


def test_queries_and_keys_are_rotated_together_where_the_backend_does_not(make_context: Any) -> None:
    operators = CountedRotations()
    attention = Attention(make_context(operators=operators), 4, 2, 8, 0.5)
    setup = AttentionSetup((attention.layer,), attention.cache, BLOCK_SIZE, "float32", "cpu", 1, 3, 64)
    backend = PlainAttention(PluginOptions(), setup)
    attention.bind(backend, torch.zeros(backend.kv_cache_shape(2)))
    backend.plan(make_batch([([1], 0, 3)], setup))
    rotation = RotaryEmbedding(
        make_context(operators=operators), RopeSpec(head_size=8, rotary_size=8, theta=1e4, max_position_embeddings=64)
    )(torch.arange(3))
    assert attention.rotate_and_forward(torch.randn(3, 6, 8), torch.randn(3, 2, 8), rotation).shape == (3, 32)
    assert operators.rotated == [[3, 6, 8]]


def small_mlp() -> GatedMLP:
    return GatedMLP(BuildContext(torch.float32, torch.device("cpu"), 64, "float32"), "mlp", 8, 6, "silu")


def test_parameters_are_counted_by_checkpoint_tensors() -> None:
    assert num_parameters(small_mlp()) == 3 * 8 * 6


def test_rules_rename_expand_and_ignore() -> None:
    mlp, oracle = small_mlp(), small_mlp()
    weights = random_weights(mlp)
    load_weights(oracle, weights.items())
    stacked = torch.stack((weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]))

    def split(match: re.Match[str], tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(f"{match[1]}.gate_proj.weight", tensor[0]), (f"{match[1]}.up_proj.weight", tensor[1])]

    rules = WeightRules(
        renamed=((r"^block\.", "mlp."),), expanded=((r"(mlp)\.both", split),), ignored=(r".*\.inv_freq",)
    )
    checkpoint = {
        "block.both": stacked,
        "block.down_proj.weight": weights["mlp.down_proj.weight"],
        "block.inv_freq": torch.zeros(3),
    }
    load_weights(mlp, checkpoint.items(), rules)
    x = torch.randn(2, 8)
    assert torch.equal(mlp(x), oracle(x))


def test_a_tensor_that_comes_twice_is_refused() -> None:
    mlp = small_mlp()
    weights = [*random_weights(mlp).items(), ("mlp.up_proj.weight", torch.zeros(6, 8))]
    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight is in the checkpoint twice"):
        load_weights(mlp, weights)


def test_long_lists_of_problems_are_cut_short() -> None:
    surplus = [(f"extra.{number}", np.float32(0)) for number in range(40)]
    with pytest.raises(ModelError, match="and 28 more"):
        load_weights(small_mlp(), [(name, torch.tensor(value)) for name, value in surplus])


def test_all_is_complete() -> None:
    assert len(set(dovetail.nn.__all__)) == len(dovetail.nn.__all__)
    assert all(name in vars(dovetail.nn) for name in dovetail.nn.__all__)
