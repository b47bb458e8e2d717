"""`checked_kernels` finds what it promises to, in our own kernels with one fault each, and numbers come out right."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from dovetail.attention_backends.paged_triton import kernels, launch
from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.plugins.operators.triton import rows
from dovetail.testing.attention_cases import CaseShape, random_case
from dovetail.testing.kernel_checks import KernelFault, checked_kernels

BFLOAT16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


Faulty = Callable[[ModuleType, str, str], ModuleType]


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Faulty]:
    """A module of kernels with one text in them replaced."""

    def changed(module: ModuleType, text: str, other: str) -> ModuleType:
        source = Path(str(module.__file__)).read_text()
        assert text in source
        path = tmp_path / "faulty_kernels.py"
        path.write_text(source.replace(text, other))
        spec = importlib.util.spec_from_file_location("faulty_kernels", path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules["faulty_kernels"] = made
        spec.loader.exec_module(made)
        return made

    yield changed
    sys.modules.pop("faulty_kernels", None)


def rms_norm(module: ModuleType, num_rows: int, size: int = 40) -> None:
    x = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, weight = torch.empty_like(x), torch.ones(64, dtype=BFLOAT16)[:size]
    module.rms_norm_kernel[(num_rows,)](out, x, weight, size, 0, 1, size, 1e-6, BLOCK=64)
    expected = torch.nn.functional.rms_norm(x.double(), (size,), eps=1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


def test_a_right_kernel_runs_and_is_counted() -> None:
    with checked_kernels() as seen:
        rms_norm(rows, 3)
    assert seen.launches == 1
    assert seen.accesses == 3 * 3 * 40


@pytest.mark.parametrize(
    ("text", "other", "num_rows", "message"),
    [
        ("start + columns, mask=mask, other=0.0", "start + columns", 1, r"load at byte 80 and 23 more of `x`"),
        ("columns < size", "columns <= size", 1, r"load at byte 80 of `x`, outside of its 80 bytes"),
        ("start = x + (index", "start = x - 1 + (index", 2, r"load at byte -2 of `x`"),
        (
            "out + index * size",
            "out + 0 * size",
            2,
            r"store at byte 0.* `out`, which program \(0, 0, 0\) touched",
        ),
        ("out + index * size + columns", "x + index * size - size * (index > 0) + columns", 2, r"touched by a load"),
    ],
    ids=["an unmasked tail", "one too many", "one too low", "two programs write a cell", "one writes what one read"],
)
def test_faults_of_memory_are_found_and_named(
    faulty: Faulty, text: str, other: str, num_rows: int, message: str
) -> None:
    """In the project's own kernel, with one fault. The weight lies in a larger tensor, whose rest is not its own."""
    module = faulty(rows, text, other)
    with (
        checked_kernels(),
        pytest.raises(KernelFault, match=r"rms_norm_kernel, .*faulty_kernels.py:\d+: .*" + message),
    ):
        rms_norm(module, num_rows)


@triton.jit
def read_as_int32(out, x, offset):
    tl.store(out, tl.load((x + offset).to(tl.pointer_type(tl.int32))))


def test_an_address_that_is_not_aligned_is_found() -> None:
    x, out = torch.arange(16, dtype=torch.int8), torch.zeros(1, dtype=torch.int32)
    with checked_kernels():
        read_as_int32[(1,)](out, x, 4)
        assert out.item() == 0x07060504
        with pytest.raises(KernelFault, match="load at byte 6 of `x`, not aligned to the element's 4 bytes"):
            read_as_int32[(1,)](out, x, 6)


@triton.jit
def count(total, ends, size, ATOMIC: tl.constexpr):
    if ATOMIC:
        tl.atomic_add(total, 1)
    else:
        tl.store(total, tl.load(total) + 1)


def test_atomic_changes_are_no_race() -> None:
    total = torch.zeros(1, dtype=torch.int32)
    with checked_kernels():
        count[(5,)](total, total, 1, ATOMIC=True)
        assert total.item() == 5
        with pytest.raises(KernelFault, match=r"program \(1, 0, 0\), .*: load .*`total`, which program \(0, 0, 0\)"):
            count[(5,)](total, total, 1, ATOMIC=False)


def attended(dtype: str, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of `paged_triton`, and the same in float64."""
    case = random_case(4, CaseShape(dtype=dtype, head_size=16, max_requests=1, max_cached=8, max_query=4))
    held = [
        replace(
            request,
            keys=request.keys.to(getattr(torch, kv_dtype)).to(request.keys.dtype),
            values=request.values.to(getattr(torch, kv_dtype)).to(request.values.dtype),
        )
        for request in case.requests
    ]
    setup = replace(case.setup, spec=replace(case.setup.spec, dtype=kv_dtype))
    case = replace(case, requests=tuple(held), setup=setup)
    backend = PagedTritonBackend(PagedTritonBackend.Options(), case.setup)
    return case.run_from_scratch(backend).double(), case.expected()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_wrong_scale_shows_in_bfloat16_and_float8(
    kv_dtype: str, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are powers of e where they should be of 2."""
    with checked_kernels():
        torch.testing.assert_close(*attended("bfloat16", kv_dtype), rtol=2e-2, atol=2e-2)
        wrong = faulty(kernels, "p = tl.exp2(", "p = tl.exp(")
        monkeypatch.setattr(launch, "attend", wrong.attend)
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(*attended("bfloat16", kv_dtype), rtol=2e-2, atol=2e-2)


@triton.jit
def convert(source, target, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    numbers = tl.load(source + places, mask=places < size)
    tl.store(target + places, numbers.to(target.dtype.element_ty), mask=places < size)


HARD = [1.9375, 1.0625, 0.0013, 2.0**-16, 2.0**-9, 3.0**-5, 448.0, 464.1, 57344.0, 1e6, 1e-9, torch.nan, torch.inf, 0.0]


@pytest.mark.parametrize("target", [torch.float32, torch.float16, BFLOAT16, E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, BFLOAT16, E4M3, E5M2])
def test_numbers_are_converted_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    """Carries, ties to even, subnormal numbers, overflow, and what is not a number."""
    numbers = torch.tensor([*HARD, *(-number for number in HARD)]).to(source)
    result = torch.zeros(len(numbers), dtype=target)
    with checked_kernels():
        convert[(1,)](numbers, result, len(numbers), BLOCK=32)
    expected = numbers.float().to(target).float()
    torch.testing.assert_close(result.float(), expected, rtol=0.0, atol=0.0, equal_nan=True)


@triton.jit
def calculate(out, left, right, OPERATION: tl.constexpr):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    a, b = tl.load(left + rows * 16 + columns), tl.load(right + rows * 16 + columns)
    if OPERATION == "dot":
        result = tl.dot(a, b)
    elif OPERATION == "multiply":
        result = a * b
    elif OPERATION == "negate":
        result = -a
    elif OPERATION == "choose":
        result = tl.where(a > b, a, b)
    else:
        result = a + b * 0.5
    tl.store(out + rows * 16 + columns, result.to(out.dtype.element_ty))


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dot": lambda a, b: (a.double() @ b.double()).float(),
    "multiply": lambda a, b: a * b,
    "negate": lambda a, b: -a,
    "choose": torch.maximum,
    "add": lambda a, b: a + b * 0.5,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bfloat16_is_computed_with_as_torch_does(operation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    expected = OPERATIONS[operation](left, right)
    out = torch.empty(16, 16, dtype=expected.dtype)
    with checked_kernels():
        calculate[(1,)](out, left, right, OPERATION=operation)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_products_of_float8_are_of_the_numbers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    with checked_kernels():
        calculate[(1,)](out, left, right, OPERATION="dot")
    torch.testing.assert_close(out, OPERATIONS["dot"](left, right), rtol=1e-5, atol=1e-5)


def test_what_nobody_looks_at_may_be_written_by_several() -> None:
    """And is still bounded."""
    total = torch.zeros(4, dtype=torch.int32)
    with checked_kernels() as checks:
        checks.dumps.append(total[:1])
        write_one[(3,)](total, 0)
        with pytest.raises(KernelFault, match="touched by a store"):
            write_one[(3,)](total, 1)
        with pytest.raises(KernelFault, match="outside"):
            write_one[(3,)](total, -1)


@triton.jit
def write_one(out, place):
    tl.store(out + place, tl.program_id(0))


def test_nothing_stays_changed() -> None:
    """Kernels compile afterwards as before; without the block a launch over the CPU's memory is refused."""
    from dovetail.testing.triton_aot import compile_kernel

    with checked_kernels():
        rms_norm(rows, 1)
    signature = {"source": "*fp32", "target": "*bf16", "size": "i32"}
    assert compile_kernel(convert, signature, {"BLOCK": 128}, 90).registers > 0
    assert rows.rms_norm_kernel.run.__module__ == "triton.runtime.jit"
