"""The `triton` operator set in Triton's interpreter. Run by test_triton.py in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.executors.gpu.capture import capture
from dovetail.nn.context import BuildContext
from dovetail.nn.kernels import PackedLinear
from dovetail.nn.moe import SparseMoE, SparseShape
from dovetail.plugins.operators.triton.operators import TritonOperators
from dovetail.testing.kernel_checks import checked_kernels
from dovetail.testing.low_rank_cases import random_low_rank
from dovetail.testing.operators_suite import OperatorsSuite
from dovetail.worker.sampling.draw import draw
from dovetail.worker.sampling.temperature import truncated_weights


@pytest.fixture(autouse=True, scope="module")
def checks() -> Iterator[None]:
    """No launch of this module reads or writes what it must not."""
    with checked_kernels():
        yield


class TestTritonOperators(OperatorsSuite):
    plugin = TritonOperators


def create() -> TritonOperators:
    return TritonOperators(TritonOperators.Options())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 7, 300, 4096, 9001]),
    is_rounded=st.booleans(),
    is_masked=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_draw_is_the_hosts_draw(
    dtype: torch.dtype, seed: int, vocab_size: int, is_rounded: bool, is_masked: bool
) -> None:
    """Rows with and without each parameter, ties among them, masked tokens, small temperatures."""
    rows, generator = 4, torch.Generator().manual_seed(seed)

    def chance(otherwise: torch.Tensor, given: float) -> torch.Tensor:
        """`otherwise` in half of the rows."""
        is_given = torch.rand(rows, generator=generator) < 0.5
        return torch.where(is_given, torch.full_like(otherwise, given), otherwise)

    logits = (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype)
    if is_rounded:
        logits = logits.round()
    if is_masked:
        logits[:, 1::2] = -torch.inf
    temperature = torch.rand(rows, generator=generator) * 1.5 + 0.05
    min_p = chance(torch.rand(rows, generator=generator) * 0.3, 0.0)
    top_k = chance(torch.randint(1, 60, (rows,), generator=generator).clamp(max=vocab_size), vocab_size)
    top_p = chance(torch.rand(rows, generator=generator, dtype=torch.float64) * 0.99 + 0.01, 1.0)
    chosen = torch.rand(rows, generator=generator, dtype=torch.float64)
    drawn = create().draw(logits, temperature, min_p, top_k, top_p, chosen)
    weights = truncated_weights(logits.float(), temperature, min_p, top_k, top_p)
    assert drawn.tolist() == draw(weights, chosen).tolist()


def test_a_sparse_block_with_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same block, expert by expert and in groups; with plain weights, as on a GPU."""
    monkeypatch.setattr(PackedLinear, "serves", staticmethod(lambda device, dtype: False))
    shape = SparseShape(
        hidden_size=32,
        intermediate_size=24,
        num_experts=4,
        top_k=2,
        normalize=True,
        hidden_act="silu",
        shared_intermediate_size=16,
    )
    blocks = []
    for operators in (None, create()):
        more = {} if operators is None else {"operators": operators}
        context = BuildContext(torch.float32, torch.device("cpu"), 64, "float32", **more)
        block = SparseMoE(context, "mlp", shape)
        generator = torch.Generator().manual_seed(3)
        for module in block.modules():
            if hasattr(module, "kernel"):
                module.kernel.weight.copy_(torch.randn(module.kernel.weight.shape, generator=generator))
        blocks.append(block)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(blocks[1](x), blocks[0](x), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(blocks[1](x[:1]), blocks[0](x[:1]), rtol=1e-4, atol=1e-3)


@torch.inference_mode()
def test_launches_are_recorded_by_the_null_device() -> None:
    """In a graph they are repeated with the tensors and numbers that they had, between torch's operations."""
    x, weight, found = torch.randn(3, 64), torch.rand(64), {}

    def work() -> None:
        found["y"] = create().rms_norm(x + 1, weight, 1e-6) * 2

    graph = capture(work)
    assert found["y"].isnan().all()
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(found["y"], create().rms_norm(x + 1, weight, 1e-6) * 2)


@torch.inference_mode()
def test_adapters_in_a_graph_are_those_of_the_step() -> None:
    """Slots and adapters are read when the graph is replayed."""
    case = random_low_rank([-1] * 20, 600, [40, 24], [4, 8], 8).to(torch.float32, "cpu")
    out = torch.empty_like(case.y)
    y, *others = case.arguments

    def work() -> None:
        out.copy_(y)
        create().add_low_rank(out, *others)

    graph = capture(work)
    for slots in ([0] * 20, [i % 3 - 1 for i in range(20)]):
        case.slots.copy_(torch.tensor(slots))
        case.b.mul_(2)
        graph.replay()
        torch.testing.assert_close(out, case.expected()[0].float(), rtol=1e-5, atol=1e-4)
