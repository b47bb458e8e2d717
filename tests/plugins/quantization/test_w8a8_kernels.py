"""The Triton kernels of `fp8` and `w8a8`: the bits of the same steps in torch, and how many launches a layer takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.contracts.quantization import LinearShape

pytest.importorskip("triton", reason="Triton is not installed (pip install dovetail[triton])")

from triton.runtime.jit import JITFunction

from dovetail.plugins.quantization.w8a8 import aot, method
from dovetail.plugins.quantization.w8a8.fused import MOST_FEW_ROWS, few_rows_products, quantize_rows, scale_products
from dovetail.testing.kernel_checks import checked_kernels
from dovetail.testing.triton_aot import compile_launch

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@pytest.fixture(autouse=True, scope="module")
def checks() -> Iterator[None]:
    """No launch of this module reads or writes what it must not."""
    with checked_kernels():
        yield


def rounded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As the contract's CPU path does it, step by step in torch."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp_min(method._TINY * MOST[dtype]) / MOST[dtype]
    values = wide / scale[:, None]
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale


@given(
    dtype=DTYPES,
    rounded_to=st.sampled_from(list(MOST)),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([16, 48, 4096, 16400]),
    odd=st.sampled_from([None, 0.0, float("nan"), float("inf"), -float("inf"), 1e-7, 65504.0]),
)
@settings(max_examples=15, deadline=None)
def test_rows_are_rounded_as_torch_does(
    dtype: torch.dtype, rounded_to: torch.dtype, seed: int, size: int, odd: float | None
) -> None:
    """Rows of any magnitude, ties between two steps, rows of nothing but zeros, and numbers that are none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, size + 8, generator=generator) * 10 ** torch.randn(4, 1, generator=generator)
    x[1] = (x[1] / x[1].abs().max() * 254).round() / 2  # halves, under a scale of 1
    x[1, 0] = 127.0
    if odd is not None:
        x[2, 5] = odd
    if odd == 0.0:
        x[2] = 0.0
    x = x.to(dtype)[:, :size]  # rows that do not touch
    values, scales = quantize_rows(x, rounded_to, MOST[rounded_to], method._TINY * MOST[rounded_to])
    expected, expected_scales = rounded(x, rounded_to)
    torch.testing.assert_close(scales, expected_scales, rtol=0.0, atol=0.0, equal_nan=True)
    if odd is not None and not torch.isfinite(scales[2]):
        values, expected = values[[0, 1, 3]], expected[[0, 1, 3]]  # whatever these are, the scale makes NaN of them
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@given(dtype=DTYPES, seed=st.integers(0, 2**32 - 1), size=st.sampled_from([16, 1040]), has_bias=st.booleans())
@settings(max_examples=8, deadline=None)
def test_products_are_scaled_as_torch_does(dtype: torch.dtype, seed: int, size: int, has_bias: bool) -> None:
    """Products in two parts, with rows behind those that are wanted."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(-(2**29), 2**29, (2, 5, size), generator=generator, dtype=torch.int32)
    products = parts.sum(0, dtype=torch.int32)
    rows, columns = torch.rand(3, generator=generator) * 1e-6, torch.rand(size, generator=generator)
    bias = torch.randn(size, generator=generator).to(dtype) * 300 if has_bias else None
    y = (products[:3].float() * rows[:, None] * columns).to(dtype)
    expected = y if bias is None else y + bias
    assert torch.equal(scale_products(parts, rows, columns, bias, dtype), expected)


@pytest.mark.parametrize("dtype", list(MOST))
@pytest.mark.parametrize(("num_rows", "in_features"), [(1, 16), (17, 2064), (64, 512)])
def test_products_of_few_rows_are_exact(dtype: torch.dtype, num_rows: int, in_features: int) -> None:
    """Sums in one part and in several, of whole numbers that float32 adds up without rounding."""
    generator = torch.Generator().manual_seed(num_rows)
    values, weights = (
        torch.randint(-12, 13, (rows, in_features), generator=generator).to(dtype) for rows in (num_rows, 48)
    )
    products = few_rows_products(values, weights)
    assert (len(products) > 1) == (in_features == 2064)
    assert torch.equal(products.sum(0).double(), values.double() @ weights.double().T)


@pytest.mark.parametrize("rows", [0, 1, 17, MOST_FEW_ROWS + 1])
def test_w8a8_on_a_gpu_has_the_bits_of_w8a8_on_a_cpu(rows: int) -> None:
    """The integer product between is exact on both, whichever kernel computes it."""
    kernel = int8_layer()
    generator = torch.Generator().manual_seed(rows)
    x, bias = torch.randn(rows, 64, generator=generator).bfloat16(), torch.randn(48, generator=generator).bfloat16()
    assert torch.equal(kernel._on_gpu(x, bias), kernel.apply(x, bias))


def int8_layer() -> method.Int8ActivationLinear:
    kernel = method.Int8ActivationLinear(LinearShape("layer", 64, 48, True), torch.device("cpu"))
    kernel.load(slice(0, 48), torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    kernel.finish()
    return kernel


class Launches(TorchDispatchMode):
    """Names of torch's operators that start a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if not function.is_view and function.namespace == "aten" and "empty" not in str(function):
            self.names.append(str(function))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [20, MOST_FEW_ROWS + 1])
def test_a_layer_takes_two_or_three_launches(monkeypatch: pytest.MonkeyPatch, num_rows: int, has_bias: bool) -> None:
    """Both round, multiply, and scale behind that; torch's product for more tokens, on the meta device here, scales
    those of `fp8` by itself."""
    kernels: list[Any] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: kernels.append(self))
    bias = torch.zeros(48, dtype=torch.bfloat16, device="meta") if has_bias else None
    shape, meta = LinearShape("layer", 64, 48, has_bias), torch.device("meta")
    layers: list[Callable[..., torch.Tensor]] = [
        method.FP8Linear(shape, meta)._on_gpu,
        method.Int8ActivationLinear(shape, meta)._on_gpu,
    ]
    is_few = num_rows <= MOST_FEW_ROWS
    for apply, of_many in zip(layers, (1, 2), strict=True):
        kernels.clear()
        with Launches() as launches:
            y = apply(torch.empty(num_rows, 64, dtype=torch.bfloat16, device="meta"), bias)
        assert (y.shape, y.dtype) == ((num_rows, 48), torch.bfloat16)
        expected = (3, 0) if is_few else (of_many, 1)
        assert (len(kernels), len(launches.names)) == expected, launches.names


@pytest.mark.parametrize(
    ("launch", "arch"),
    [(launch, 90) for launch in aot.launches()]
    + [
        pytest.param(launch, arch, marks=pytest.mark.kernels)
        for dtype in ("bf16", "fp16", "fp32")
        for arch in (80, 89, 100, 120)
        for launch in aot.launches(dtype)
        if arch != 80 or "fp8" not in launch.name
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_kernels_compile_for_gpus_without_spilling(launch: Any, arch: int) -> None:
    assert compile_launch(launch, arch).stack_bytes == 0
