"""The Triton kernels of `int4`, against weights taken apart by the formula, and in the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.weights import PackedTensor
from dovetail.testing.quantization_suite import QuantizationSuite

pytest.importorskip("triton", reason="Triton is not installed (pip install dovetail[triton])")

from dovetail.plugins.quantization.int4 import aot
from dovetail.plugins.quantization.int4.method import Int4Method, _Packed, tile_sizes
from dovetail.plugins.quantization.parts import cut
from dovetail.plugins.weight_formats.int4_checkpoint import pack_groups
from dovetail.testing.kernel_checks import checked_kernels
from dovetail.testing.triton_aot import compile_launch


@pytest.fixture(autouse=True, scope="module")
def checks() -> Iterator[None]:
    """No launch of this module reads or writes what it must not."""
    with checked_kernels():
        yield


def groups(rows: int, columns: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [rows, columns], z and s [rows, groups] as AWQ and GPTQ checkpoints have them: z is 0 to 16."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    z = torch.randint(0, 17, (rows, columns // size), generator=generator).half()
    s = (torch.rand(rows, columns // size, generator=generator) * 0.02 + 0.002).half()
    return q, z, s


@given(
    num_rows=st.sampled_from([1, 16, 17, 33, 65, 129]),
    group_size=st.sampled_from([32, 64, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    num_groups=st.integers(1, 3),
    features=st.sampled_from([1, 16, 130]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=12, deadline=None)
def test_products_are_those_of_the_weights(
    num_rows: int, group_size: int, dtype: torch.dtype, num_groups: int, features: int, seed: int
) -> None:
    """Tiles of every height, tiles that are not full, groups longer and shorter than a step: off by one rounding."""
    q, z, s = groups(features, num_groups * group_size, group_size, seed)
    part = _Packed.of(pack_groups("layer", q, z, s, group_size), torch.device("cpu"))
    weight = (q.double().view(features, num_groups, -1) - z.double()[..., None]) * s.double()[..., None]
    x = torch.randn(num_rows, q.shape[1], generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = x.double() @ weight.view(q.shape).T
    scale = x.double().abs() @ weight.view(q.shape).abs().T
    error = (part.multiplied(x).double() - expected).abs()
    assert bool((error <= torch.finfo(dtype).eps * expected.abs() + 2e-6 * scale).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_parts_are_added(dtype: torch.dtype) -> None:
    """Few tokens times a long input: several programs share a sum."""
    q, z, s = groups(40, 4096, 128, seed=1)
    part = _Packed.of(pack_groups("layer", q, z, s, 128), torch.device("cpu"))
    num_parts, size = cut(1, 3, 4096, tile_sizes(3, 128, dtype.itemsize)["DEPTH"], 128)
    assert (num_parts, size % 128) == (8, 0)
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ part.written_out(0, 40, torch.float32).double().T
    torch.testing.assert_close(part.multiplied(x).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize(("in_features", "group_size"), [(32, 32), (4096, 128), (14336, 32), (14336, 256)])
def test_parts_hold_all_input_features(num_rows: int, in_features: int, group_size: int) -> None:
    for num_tiles in (1, 32, 100, 1000):
        count, size = cut(num_tiles, num_rows, in_features, tile_sizes(num_rows, group_size, 2)["DEPTH"], group_size)
        assert size % group_size == 0
        assert (count - 1) * size < in_features <= count * size


@pytest.mark.nightly
class TestInt4OnGPUs(QuantizationSuite):
    """The suite, with the kernel in place of torch's product."""

    plugin = Int4Method
    tolerance = 0.01
    packed_formats = frozenset({"int4g64", "int4g128"})

    @pytest.fixture(autouse=True)
    def kernel_everywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_Packed, "apply", _Packed.multiplied)

    def weight(self, rows: int, columns: int, seed: int) -> PackedTensor:
        size = 128 if seed % 10 == 2 else 64
        return pack_groups("layer", *groups(rows, columns, size, seed), size)


@pytest.mark.parametrize(
    ("launch", "arch"),
    [(launch, 90) for launch in aot.launches()]
    + [
        pytest.param(launch, arch, marks=pytest.mark.kernels)
        for dtype in ("bf16", "fp16", "fp32")
        for group_size in (32, 128)
        for arch in (80, 89, 100, 120)
        for launch in aot.launches(dtype, group_size)
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_kernels_compile_for_gpus_without_spilling(launch: Any, arch: int) -> None:
    """Into no more shared memory than consumer GPUs have."""
    used = compile_launch(launch, arch)
    assert used.stack_bytes <= 16
    assert used.shared_bytes <= 99 * 1024
