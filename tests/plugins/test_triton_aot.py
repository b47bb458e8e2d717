"""What is compiled ahead of time is what runs: operators and quantized layers are called with an 8B model's sizes, and
what reaches Triton is compared with the declarations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install dovetail[triton])")

from triton.runtime.jit import JITFunction

from dovetail.nn.triton_launch import FP_FUSION, Launch
from dovetail.plugins.operators.triton import aot
from dovetail.plugins.operators.triton.operators import TritonOperators
from dovetail.plugins.quantization import int8_kernel
from dovetail.plugins.quantization.int4 import aot as int4_aot
from dovetail.plugins.quantization.int4.kernels import int4_linear_kernel
from dovetail.plugins.quantization.int4.method import _Packed
from dovetail.plugins.quantization.parts_kernel import sum_parts_kernel
from dovetail.plugins.quantization.w8a8 import aot as w8a8_aot
from dovetail.plugins.quantization.w8a8.fused import few_rows_products, quantize_rows, scale_products
from dovetail.testing.chain_cases import random_chains

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
Recorded = list[tuple[Any, dict[str, Any]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Kernels with their arguments by name, in place of running them."""
    launches: Recorded = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launches.append((self, dict(zip(self.arg_names, arguments, strict=False)) | named))

    monkeypatch.setattr(JITFunction, "run", run)
    return launches


def as_triton_sees(value: Any, is_specialized: bool) -> Any:
    """The type of an argument, or the value of one that is compiled as a constant."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if not is_specialized:
        return "i32"
    return 1 if value == 1 else "i32:16" if value % 16 == 0 else "i32"


def call_each(operators: TritonOperators) -> None:
    """Each operator once, in the order of the declarations."""
    x, weight = torch.empty(2, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    heads, angles = x.new_empty(2, 40, 128), x.new_empty(2, 1, 128)
    expert, starts = x.new_empty(2, 64, 4096), torch.tensor([0, 1, 2], dtype=torch.int32)
    ones = torch.ones(2)
    operators.rms_norm(x, weight, 1e-5)
    operators.add_rms_norm(x, x, weight, 1e-5)
    operators.silu_mul(x)
    operators.rotate(heads, angles, angles)
    operators.draw(x.new_empty(2, aot.VOCAB_SIZE), ones, ones, ones.long(), ones.double(), ones.double())
    operators.accept_chains(*random_chains([1], aot.VOCAB_SIZE).arguments)
    operators.grouped_linear(x, expert, starts)
    operators.grouped_linear(x.new_empty(64, 4096), expert, starts)
    for rank in (16, 64):
        a, b = x.new_empty(4, 3, rank, 4096), x.new_empty(4, rank, 6144)
        places = (torch.zeros(size, dtype=torch.int32) for size in (4, 4, 2))
        operators.add_low_rank(x.new_empty(2, 6144), x, a, b, *places)


def test_declarations_are_what_runs(recorded: Recorded) -> None:
    call_each(TritonOperators(TritonOperators.Options()))
    assert_as_declared(aot.launches(), recorded)


def test_declarations_of_eight_bits_are_what_runs(recorded: Recorded) -> None:
    x, scales, size = torch.empty(2, 4096, dtype=torch.bfloat16), torch.ones(2), 6144
    quantize_rows(x, torch.int8, 127.0, 1e-30, 17)
    quantize_rows(x, torch.float8_e4m3fn, 448.0, 1e-30)
    products, bias = torch.empty(1, 17, size, dtype=torch.int32), torch.empty(size, dtype=torch.bfloat16)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for num_rows in (16, 32, 64):
            few_rows_products(torch.empty(num_rows, 4096, dtype=dtype), torch.empty(size, 4096, dtype=dtype))
    scale_products(products, scales, torch.ones(size), bias, torch.bfloat16)
    assert_as_declared(w8a8_aot.launches(), recorded)


def test_declarations_of_four_bits_are_what_runs(recorded: Recorded) -> None:
    scales, zeros = torch.empty(2, 32, 4096, dtype=torch.float16)
    part = _Packed(torch.empty(4096, 2048, dtype=torch.uint8), scales, zeros, 128)
    for num_rows in int4_aot.NUM_ROWS:
        part.multiplied(torch.empty(num_rows if num_rows <= 64 else 8 * num_rows, 4096, dtype=torch.bfloat16))
    products = [launch for launch in recorded if launch[0] is int4_linear_kernel]
    sums = [launch for launch in recorded if launch[0] is sum_parts_kernel]
    assert_as_declared(int4_aot.launches(), [*products, sums[0]])


def test_declarations_of_int8_weights_are_what_runs(recorded: Recorded) -> None:
    weights, scales = torch.empty(64, 4096, dtype=torch.int8), torch.ones(64)
    for num_rows in (16, 32, 64, 128):
        count = num_rows if num_rows <= 64 else 8 * num_rows
        int8_kernel.multiplied(torch.empty(count, 4096, dtype=torch.bfloat16), weights, scales)
    assert_as_declared(int8_kernel.launches(), [launch for launch in recorded if launch[0] is not sum_parts_kernel])


def assert_as_declared(declared: list[Launch], recorded: Recorded) -> None:
    """One by one: types, constants and options."""
    assert [kernel for kernel, _ in recorded] == [launch.kernel for launch in declared]
    for launch, (_, arguments) in zip(declared, recorded, strict=True):
        compare(launch, arguments)


def compare(launch: Launch, arguments: dict[str, Any]) -> None:
    options = {key: arguments.pop(key) for key in list(arguments) if key not in launch.kernel.arg_names}
    assert {**FP_FUSION, **launch.options} == options, launch.name
    constexprs = {param.name for param in launch.kernel.params if param.is_constexpr}
    plain = {param.name for param in launch.kernel.params if param.do_not_specialize}
    seen = {
        name: value if name in constexprs else as_triton_sees(value, name not in plain)
        for name, value in arguments.items()
    }
    declared = {name: launch.constants.get(name, launch.signature.get(name)) for name in launch.kernel.arg_names}
    assert seen == declared, launch.name
