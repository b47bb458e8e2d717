"""Some of a model's weights, loaded into blocks that have theirs: the others stay, and so does their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.contracts.errors import ModelError
from dovetail.nn import (
    BuildContext,
    Communicator,
    LMHead,
    QKVLinear,
    RowLinear,
    SparseMoE,
    SparseShape,
    TorchLinear,
    VocabEmbedding,
    expected_shapes,
    load_weights,
)
from dovetail.testing.thread_ranks import run_in_threads

HIDDEN, VOCAB = 16, 40
NAMES = ("q", "k", "v")


def context(dtype: torch.dtype = torch.float32, communicator: Communicator | None = None) -> BuildContext:
    made = BuildContext(dtype, torch.device("cpu"), max_model_len=8, kv_dtype="float32")
    if communicator is not None:
        made.communicator = communicator
    return made


def attention_block(context: BuildContext) -> torch.nn.Module:
    """Fused and sharded by heads, and sharded by inputs."""
    return torch.nn.ModuleList(
        [QKVLinear(context, "qkv", HIDDEN, 4, 2, 4, NAMES, bias=True), RowLinear(context, "o", 16, HIDDEN)]
    )


def tied_ends(context: BuildContext) -> torch.nn.Module:
    table = VocabEmbedding(context, "table", VOCAB, HIDDEN)
    return torch.nn.ModuleList([table, LMHead(context, "head", VOCAB, HIDDEN, table)])


def experts(context: BuildContext) -> torch.nn.Module:
    return SparseMoE(
        context,
        "moe",
        SparseShape(hidden_size=HIDDEN, intermediate_size=8, num_experts=4, top_k=2, normalize=True, hidden_act="silu"),
    )


def weights_of(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(module).items()}


def run(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    blocks: list[Any] = list(module) if isinstance(module, torch.nn.ModuleList) else [module]
    if isinstance(blocks[0], QKVLinear):
        qkv = blocks[0](x)
        return torch.cat([qkv, blocks[1](qkv[:, : blocks[0].num_heads * 4])], dim=1)
    if isinstance(blocks[0], VocabEmbedding):
        return torch.cat([blocks[0](torch.arange(len(x))), blocks[1](x)], dim=1)
    output: torch.Tensor = blocks[0](x)
    return output


@torch.inference_mode()
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", [attention_block, tied_ends, experts])
def test_each_tensor_alone_gives_what_a_fresh_block_gives(make: Any, dtype: torch.dtype, num_ranks: int) -> None:
    """Also where oneDNN packs the weights (float32, bfloat16), and on ranks that hold a share."""
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)

    def work(communicator: Communicator) -> None:
        module = make(context(dtype, communicator))
        known, new = weights_of(module, 1), weights_of(module, 2)
        load_weights(module, known.items())
        for name in known:
            known[name] = new[name]
            load_weights(module, [(name, new[name])], partial=True)
            fresh = make(context(dtype, communicator))
            load_weights(fresh, known.items())
            assert torch.equal(run(module, x), run(fresh, x)), name

    run_in_threads(num_ranks, work)


def test_plain_weights_stay_where_they_are() -> None:
    """What a captured graph, or a stack of experts, knows of them stays true."""
    module = attention_block(context(torch.float64))
    load_weights(module, weights_of(module, 1).items())
    kernels = [block.kernel for block in module.children() if isinstance(block.kernel, TorchLinear)]
    before = [kernel.weight.data_ptr() for kernel in kernels]
    load_weights(module, [("k.weight", torch.zeros(8, HIDDEN))], partial=True)
    assert [kernel.weight.data_ptr() for kernel in kernels] == before
    assert len(before) == 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"nobody.weight": (2, 2)}, r"these weights do not fit .*not expected \(1\): nobody.weight"),
        ({"o.bias": (HIDDEN,)}, r"not expected \(1\): o.bias"),
        ({"k.weight": (3, HIDDEN)}, r"k.weight has shape \[3, 16\], the config implies \[8, 16\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given: dict[str, tuple[int, ...]], reason: str) -> None:
    module = attention_block(context())
    load_weights(module, weights_of(module, 1).items())
    with pytest.raises(ModelError, match=reason):
        load_weights(module, [(name, torch.zeros(shape)) for name, shape in given.items()], partial=True)


def test_parts_of_a_model_that_others_lack_are_refused_too() -> None:
    """A whole checkpoint may have a vision tower; an update of weights names what it means."""
    module = attention_block(context())
    weights = weights_of(module, 1)
    load_weights(module, [*weights.items(), ("vision.patches.weight", torch.zeros(2, 2))])
    with pytest.raises(ModelError, match=r"vision\.patches\.weight"):
        load_weights(module, [("vision.patches.weight", torch.zeros(2, 2))], partial=True)
