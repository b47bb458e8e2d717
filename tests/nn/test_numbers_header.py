"""`dovetail/numbers.h`, with the processor's own instructions and without, against torch."""

from __future__ import annotations

import ctypes

import pytest
import torch

from dovetail.nn import native

SOURCE = """
#include <dovetail/numbers.h>
#define FOR_ALL for (int64_t i = 0; i < count; i++)
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
void from_float16(const uint16_t *x, float *y, int64_t count) { FOR_ALL y[i] = dovetail_from_float16(x[i]); }
void floats_from_float16(const void *x, void *y, int64_t count) { dovetail_floats_from_float16(x, y, count); }
void from_bfloat16(const uint16_t *x, float *y, int64_t count) { FOR_ALL y[i] = dovetail_from_bfloat16(x[i]); }
void to_float16(const float *x, uint16_t *y, int64_t count) { FOR_ALL y[i] = dovetail_to_float16(x[i]); }
void to_bfloat16(const float *x, uint16_t *y, int64_t count) { FOR_ALL y[i] = dovetail_to_bfloat16(x[i]); }
void exp_series(const float *x, float *y, int64_t count) { FOR_ALL y[i] = DOVETAIL_EXP_SERIES(x[i], MULTIPLY_ADD); }
"""

pytestmark = pytest.mark.skipif(not native.find_compilers(), reason="no C compiler")


@pytest.fixture(scope="module", params=["", "#define PORTABLE"], ids=["own", "portable"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = tmp_path_factory.mktemp("numbers") / "numbers_test.c"
    source.write_text(f"{request.param}\n{SOURCE}")
    return native.load(source)


def call(library: ctypes.CDLL, name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(len(x), dtype=dtype)
    library[name](ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
    return y


def halves() -> torch.Tensor:
    """Every number of 16 bits, as int16."""
    return torch.arange(-(2**15), 2**15).short()


def floats() -> torch.Tensor:
    """Between any two neighbouring numbers of either kind: themselves, the middle, and what lies beside it."""
    exact = torch.cat([halves().view(dtype).float() for dtype in (torch.float16, torch.bfloat16)])
    bits = exact[exact.isfinite()].view(torch.int32)
    steps = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001])
    found = (bits[:, None] + steps.int()).flatten().view(torch.float32)
    return torch.cat((found[~found.isnan()], torch.tensor([torch.inf, -torch.inf])))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("from_float16", torch.float16),
        ("floats_from_float16", torch.float16),
        ("from_bfloat16", torch.bfloat16),
    ],
)
def test_every_number_of_16_bits_is_read(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    x = halves()
    assert torch.equal(call(library, name, x, torch.float32).isnan(), x.view(dtype).isnan())
    x = x[~x.view(dtype).isnan()]
    assert torch.equal(call(library, name, x, torch.float32).view(torch.int32), x.view(dtype).float().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_numbers_are_rounded_as_torch_does(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    name, x = f"to_{str(dtype).removeprefix('torch.')}", floats()
    assert torch.equal(call(library, name, x, torch.int16), x.to(dtype).view(torch.int16))
    for bits in (0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1):
        assert call(library, name, torch.tensor([bits], dtype=torch.int32), torch.int16).view(dtype).isnan().all()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 16, 23, 25])
def test_as_many_are_read_as_were_asked_for(library: ctypes.CDLL, count: int) -> None:
    x, y = torch.arange(32).half(), torch.full((32,), -1.0)
    library.floats_from_float16(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(count))
    assert y.tolist() == [*range(count), *[-1] * (32 - count)]


def test_the_series_is_that_of_exp(library: ctypes.CDLL) -> None:
    x = torch.linspace(-0.3466, 0.3466, 10001)
    error = call(library, "exp_series", x, torch.float32).double() / x.double().exp() - 1
    assert error.abs().max() < 2e-7
