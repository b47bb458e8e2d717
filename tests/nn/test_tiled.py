"""Tiles make the bits of a row its own, whatever the library below does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.quantization import LinearKernel
from dovetail.nn.kernels import TILE_ROWS, TiledLinear, TorchLinear, plain_kernel

SHAPES = [(64, 96), (576, 192), (37, 50)]


def kernel_of(shape: tuple[int, int], dtype: torch.dtype) -> LinearKernel:
    columns, rows = shape
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    kernel = plain_kernel(torch.empty_like(weight), batch_invariant=True)
    kernel.load(slice(0, rows), weight)
    kernel.finish()
    return kernel


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype, data: st.DataObject
) -> None:
    kernel = kernel_of(shape, dtype)
    count = data.draw(st.integers(1, 3 * TILE_ROWS), label="rows")
    place = data.draw(st.integers(0, count - 1), label="place")
    has_bias = data.draw(st.booleans(), label="bias")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    x = torch.randn(count, shape[0], generator=generator).to(dtype)
    bias = torch.randn(shape[1], generator=generator).to(dtype) if has_bias else None
    assert torch.equal(kernel.apply(x, bias)[place], kernel.apply(x[place : place + 1], bias)[0])


@pytest.mark.parametrize("count", [0, 1, TILE_ROWS, 2 * TILE_ROWS + 3])
def test_the_product_is_that_of_the_kernel_below(count: int) -> None:
    kernel = kernel_of((64, 96), torch.float32)
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    x = torch.randn(count, 64)
    torch.testing.assert_close(kernel.apply(x, None), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_favours_places_runs_row_by_row() -> None:
    class Favours(TorchLinear):
        def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return super().apply(x, bias) + torch.arange(len(x))[:, None]

    weight = torch.randn(5, 4)
    kernel = TiledLinear(Favours(weight), 4, weight)
    kernel.finish()
    x = torch.randn(3, 4)
    torch.testing.assert_close(kernel.apply(x, None), x @ weight.T)
