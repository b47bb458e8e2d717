"""The native set beside plain torch: where the contract leaves no room, the bits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.needs import reasons_against
from dovetail.contracts.operators import Operators, OperatorsNeed
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.nn.native import loader as native
from dovetail.nn.operators import TorchOperators
from dovetail.nn.replay import Replay, record
from dovetail.plugins.operators.native import NativeOperators
from dovetail.plugins.operators.native.operators import SOURCE
from dovetail.testing.low_rank_cases import random_low_rank

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
PLAIN = TorchOperators(PluginOptions())


@pytest.fixture(scope="module")
def operators() -> NativeOperators:
    if reasons := native.reasons_against(SOURCE):
        pytest.skip(" ".join(reasons))
    return NativeOperators(PluginOptions())


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@settings(max_examples=40, deadline=None)
@given(DTYPES, st.integers(0, 9), st.integers(1, 6), st.integers(1, 40), st.integers(0, 9), st.integers(0, 99))
def test_rotations_have_torchs_bits(
    operators: Operators, dtype: torch.dtype, tokens: int, heads: int, half: int, rest: int, seed: int
) -> None:
    rows = random(tokens, heads + 1, 2 * half + rest, dtype=dtype, seed=seed)
    cos, sin = random(tokens, 2, 1, 2 * half, dtype=dtype, seed=seed + 1).unbind(1)
    expected = PLAIN.rotate(rows[:, 1:].clone(), cos, sin)
    assert torch.equal(operators.rotate(rows[:, 1:], cos, sin), expected)
    assert torch.equal(rows[:, 1:], expected), "fused rows are turned where they stand"


@settings(max_examples=40, deadline=None)
@given(DTYPES, st.integers(0, 9), st.integers(1, 700), st.integers(0, 99))
def test_norms_differ_by_the_order_of_a_sum(
    operators: Operators, dtype: torch.dtype, rows: int, size: int, seed: int
) -> None:
    x, residual = random(rows, size, dtype=dtype, seed=seed), random(rows, size, dtype=dtype, seed=seed + 1)
    weight = random(size, dtype=dtype, seed=seed + 2)
    normed, total = operators.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    expected, expected_total = PLAIN.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0.0)


def test_another_dtype_or_size_is_an_error(operators: Operators) -> None:
    """Kernels read by address: what does not fit must not reach them."""
    rows = torch.ones(2, 8)
    with pytest.raises(TypeError, match="no kernel for"):
        operators.silu_mul(rows.half())
    with pytest.raises(TypeError, match="no kernel for"):
        operators.rms_norm(rows, torch.ones(8, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="norm of 7 elements for rows of 8"):
        operators.rms_norm(rows, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="a residual"):
        operators.add_rms_norm(rows, torch.ones(1, 8), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="angles"):
        operators.rotate(torch.ones(2, 1, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 8))


def test_adapters_that_do_not_fit_are_an_error(operators: NativeOperators) -> None:
    case = random_low_rank([0, 1], 8, [6, 4], [2, 1], 2).to(torch.float32, "cpu")
    y, x, a, b, *places = case.arguments
    with pytest.raises(TypeError, match=r"no kernel adds torch\.float16 x torch\.float32 adapters"):
        operators.add_low_rank(y, x, a.half(), b, *places)
    for wrong in ((y[:1], x, a, b), (y, x[:, :7], a, b), (y, x, a, b[:, :1]), (y, x, a[:1], b)):
        with pytest.raises(ValueError, match=r"rows \[2, \d\] -> \[\d, 10\] and \[2\] slots for adapters"):
            operators.add_low_rank(*wrong, *places)
    with pytest.raises(ValueError, match="elements of a row must be contiguous"):
        operators.add_low_rank(y.T.contiguous().T, x, a, b, *places)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_adapters_give_the_bits_of_wide_ones(operators: NativeOperators, narrow: torch.dtype) -> None:
    """Their numbers are widened, and summed in the same order."""
    case = random_low_rank([i % 5 - 1 for i in range(40)], 300, [50, 131], [16, 3, 8, 16], 16).to(torch.float32, "cpu")
    y, x, a, b, *places = case.arguments
    expected = y.clone()
    operators.add_low_rank(expected, x, a.to(narrow).float(), b.to(narrow).float(), *places)
    operators.add_low_rank(y, x, a.to(narrow), b.to(narrow), *places)
    assert torch.equal(y, expected)


@torch.inference_mode()
@pytest.mark.parametrize(("threads", "num_slots"), [(1, 4), (3, 4), (2, 9)])
def test_threads_and_replays_add_the_same_adapters(operators: NativeOperators, threads: int, num_slots: int) -> None:
    """A large layer, whose blocks are shared by threads, whole or cut, and a replay that reads other slots from the
    same memory."""
    slots_of_rows, ranks = [i % (num_slots + 1) - 1 for i in range(40)], [16, 3, 8, 16, 1, 16, 9, 2, 16][:num_slots]
    case = random_low_rank(slots_of_rows, 300, [500, 500], ranks, 16).to(torch.float32, "cpu")
    expected = case.arguments[0]
    operators.add_low_rank(expected, *case.arguments[1:])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:

        def forward(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            out = operators.take_rows(y, everything)
            operators.add_low_rank(out, x, *adapters, slots)
            return out

        adapters = case.arguments[2:6]
        everything, slots = torch.arange(40), torch.full_like(case.slots, -1)
        first, recording = record(forward, (case.y, case.x))
        assert isinstance(recording, Replay), recording
        assert torch.equal(first, case.y)
        recording.forget()
        slots.copy_(case.slots)
        assert torch.equal(recording.run(), expected)
        assert torch.equal(forward(case.y, case.x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("need", [OperatorsNeed("cuda", "float32"), OperatorsNeed("cpu", "float16")])
def test_other_devices_and_dtypes_are_refused(need: OperatorsNeed) -> None:
    [reason] = reasons_against(NativeOperators, need, PluginOptions(), Environment(need.device_type, 2, 2**30))
    assert need.device_type in reason or need.dtype in reason


def test_a_machine_without_a_compiler_or_a_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native, "cache_directory", lambda: tmp_path)
    need, environment = OperatorsNeed("cpu", "float32"), Environment("cpu", 2, 2**30)
    [reason] = reasons_against(NativeOperators, need, PluginOptions(), environment)
    assert "compiler" in reason
