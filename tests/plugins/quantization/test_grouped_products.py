"""Products with weights in groups, of every format and around every number of rows at which the kernels change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.contracts.quantization import LinearShape
from dovetail.contracts.weights import PackedTensor
from dovetail.nn import native
from dovetail.nn.huge_pages import WeightMemory
from dovetail.nn.replay import Replay, record
from dovetail.plugins.quantization.grouped import kernel as grouped
from dovetail.plugins.quantization.grouped.formats import PACKED_FORMATS
from dovetail.plugins.quantization.grouped.kernel import SOURCE, GroupedLinear
from dovetail.testing.packed_blocks import random_blocks

_REASONS = native.reasons_against(SOURCE)
pytestmark = pytest.mark.skipif(bool(_REASONS), reason="; ".join(_REASONS))

NUM_ROWS = (0, 1, 3, 4, 6, 8, 15, 16, 19, 200)
OUT_FEATURES = 69
"""Whole tiles of 8 and of 16 rows, an odd number of both, and a broken one."""
_MULTIPLIED_SCALES = {name for name in PACKED_FORMATS if name.startswith("IQ") or name.endswith("_K")} - {"IQ4_NL"}


def loaded(packed: PackedTensor) -> GroupedLinear:
    rows, columns = packed.shape
    kernel = GroupedLinear(LinearShape("layer", columns, rows, has_bias=False), WeightMemory())
    kernel.load(slice(0, rows), packed)
    kernel.finish()
    return kernel


def as_multiplied(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64: activations as the kernels round them, and by how much else they may be off: a step where two integers
    are about equally near."""
    blocks = x.float().unflatten(1, (-1, 32))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    exact = blocks.double() * (1 / step).double()
    is_between = ((exact - exact.floor()) - 0.5).abs() < 1e-4
    return (exact.round() * step).view(x.shape), (is_between * step.double()).view(x.shape)


def assert_multiplies(kernel: GroupedLinear, packed: PackedTensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Against the product of the rounded activations with the dequantized weights."""
    weight = packed.dequantized().double()
    rounded, doubt = as_multiplied(x)
    expected = rounded @ weight.T + (0 if bias is None else bias.double())
    # Scales that are products of two numbers are rounded to float16.
    off = 2**-10 * (weight.abs().amax() + 0.1) if packed.format in _MULTIPLIED_SCALES else 0
    bound = doubt @ weight.abs().T + rounded.abs() @ (weight.abs() * 1e-5 + off).T + 1e-6
    bound += expected.abs() * (2**-8 if x.dtype == torch.bfloat16 else 1e-6)
    y = kernel.apply(x, bias)
    assert (y.dtype, y.shape) == (x.dtype, expected.shape)
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("name", sorted(PACKED_FORMATS))
def test_products_are_those_of_the_dequantized_weights(name: str, num_rows: int) -> None:
    packed = random_blocks(name, OUT_FEATURES, num_blocks=2, seed=2)
    kernel = loaded(packed)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, packed.shape[1], generator=generator)
    bias = torch.randn(OUT_FEATURES, generator=generator)
    assert_multiplies(kernel, packed, x, None)
    assert_multiplies(kernel, packed, x, bias)
    assert_multiplies(kernel, packed, x.bfloat16(), None)
    assert_multiplies(kernel, packed, x.bfloat16(), bias.bfloat16())
    assert_multiplies(kernel, packed, x.bfloat16(), bias)


@pytest.mark.parametrize("name", sorted(PACKED_FORMATS))
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str) -> None:
    """Rows of a verify step are those of single steps."""
    packed = random_blocks(name, OUT_FEATURES, num_blocks=2, seed=3)
    kernel = loaded(packed)
    x = torch.randn(24, packed.shape[1], generator=torch.Generator().manual_seed(1))
    alone = torch.cat([kernel.apply(row[None], None) for row in x])
    for num_rows in (*range(2, 17), 24):
        assert torch.equal(kernel.apply(x[:num_rows], None), alone[:num_rows]), num_rows


@pytest.mark.nightly  # compiling takes 40 s
def test_kernels_without_instructions_of_one_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    portable = tmp_path / "linear.c"
    portable.write_text(f"#define PORTABLE\n{SOURCE.read_text()}")
    monkeypatch.setattr(grouped, "SOURCE", portable)
    for name in sorted(PACKED_FORMATS):
        packed = random_blocks(name, OUT_FEATURES, num_blocks=1, seed=3)
        kernel = loaded(packed)
        for num_rows in (3, 19):
            drawn = torch.Generator().manual_seed(num_rows)
            rows, bias = (
                torch.randn(*shape, generator=drawn) for shape in ((num_rows, packed.shape[1]), (OUT_FEATURES,))
            )
            assert_multiplies(kernel, packed, rows, bias)


def test_activations_and_biases_of_another_width_are_refused() -> None:
    kernel = loaded(random_blocks("Q4_1", 40, num_blocks=2, seed=4))
    with pytest.raises(ValueError, match="64 features, not 32"):
        kernel.apply(torch.zeros(2, 32), None)
    with pytest.raises(ValueError, match="bias 39"):
        kernel.apply(torch.zeros(2, 64), torch.zeros(39))


@pytest.mark.parametrize("wrong", [-1, 40, 10**12])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_rows_that_are_not_there_are_refused(wrong: int, num_parts: int) -> None:
    kernel = GroupedLinear(LinearShape("layer", 64, 40, has_bias=False), WeightMemory())
    for part in range(num_parts):
        share = 40 // num_parts
        kernel.load(slice(part * share, (part + 1) * share), torch.randn(share, 64))
    kernel.finish()
    with pytest.raises(IndexError, match=f"rows 0 to 39, and no {wrong}$"):
        kernel.lookup(torch.tensor([3, wrong]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_a_bias_can_be_replayed(dtype: torch.dtype) -> None:
    kernel = loaded(random_blocks("Q4_1", 40, num_blocks=2, seed=5))
    bias, inputs = torch.randn(40).to(dtype), (torch.randn(2, 64).to(dtype), torch.zeros(2, dtype=torch.int64))
    output, replay = record(lambda x, _: kernel.apply(x, bias), inputs)
    assert isinstance(replay, Replay), replay
    assert torch.equal(replay.run(), output)
