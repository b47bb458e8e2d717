"""How launches are described to Triton's compiler."""

from __future__ import annotations

from dovetail.testing.triton_aot import split_types


def test_pointers_and_marked_numbers_are_multiples_of_16() -> None:
    types, known = split_types({"x": "*bf16", "stride": "i32:16", "count": "i32", "BLOCK": "constexpr"})
    assert types == {"x": "*bf16", "stride": "i32", "count": "i32", "BLOCK": "constexpr"}
    assert known == {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
