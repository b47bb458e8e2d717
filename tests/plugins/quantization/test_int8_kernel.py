"""The Triton kernel of `int8` (weights only): products with the weights that the int8 values encode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.testing.quantization_suite import QuantizationSuite

pytest.importorskip("triton", reason="Triton is not installed (pip install dovetail[triton])")

from dovetail.plugins.quantization.int8 import Int8Linear, Int8Method
from dovetail.plugins.quantization.int8_kernel import launches, multiplied
from dovetail.testing.kernel_checks import checked_kernels
from dovetail.testing.triton_aot import compile_launch


@pytest.fixture(autouse=True, scope="module")
def checks() -> Iterator[None]:
    """No launch of this module reads or writes what it must not."""
    with checked_kernels():
        yield


@given(
    num_rows=st.sampled_from([0, 1, 17, 33, 65, 129]),
    features=st.sampled_from([(8, 1), (130, 16), (200, 130), (2100, 40)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=12, deadline=None)
def test_products_are_those_of_the_weights(
    num_rows: int, features: tuple[int, int], dtype: torch.dtype, seed: int
) -> None:
    """Input features that are no multiple of a step, sums in parts, tiles of every height: off by one rounding."""
    in_features, out_features = features
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(-127, 128, (out_features, in_features), generator=generator, dtype=torch.int8)
    scales = torch.rand(out_features, generator=generator) + 0.01
    x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    exact = weights.double() * scales.double()[:, None]
    expected, scale = x.double() @ exact.T, x.double().abs() @ exact.abs().T
    error = (multiplied(x, weights, scales).double() - expected).abs()
    assert bool((error <= torch.finfo(dtype).eps * expected.abs() + 2e-6 * scale).all())


@pytest.mark.nightly
class TestInt8OnGPUs(QuantizationSuite):
    """The suite, with the kernel in place of torch's products."""

    plugin = Int8Method
    tolerance = 0.01

    @pytest.fixture(autouse=True)
    def kernel_everywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def apply(self: Int8Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            y = multiplied(x, self._quantized, self._scale)
            return y if bias is None else y + bias

        monkeypatch.setattr(Int8Linear, "apply", apply)


@pytest.mark.parametrize(
    ("launch", "arch"),
    [(launch, 90) for launch in launches()]
    + [
        pytest.param(launch, arch, marks=pytest.mark.kernels)
        for dtype in ("bf16", "fp16", "fp32")
        for arch in (80, 89, 100, 120)
        for launch in launches(dtype)
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_kernels_compile_for_gpus_without_spilling(launch: Any, arch: int) -> None:
    """Into no more shared memory than consumer GPUs have."""
    used = compile_launch(launch, arch)
    assert used.stack_bytes == 0
    assert used.shared_bytes <= 99 * 1024
