"""The loops of compiled kernels, instruction by instruction: what a change costs in the part of a kernel that takes the
time, without a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dovetail.testing.triton_aot import inspect_cubin

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", re.MULTILINE)
_TARGET = re.compile(r"(0x[0-9a-f]+)\s*$")
_NARROW = re.compile(r"^LDG\b.*\.(U8|S8|U16|S16)\b")
_SHORTEST = 4
"""Shorter loops only wait."""


@dataclass(frozen=True)
class Loop:
    """One innermost loop, or a kernel without: what a warp executes in one turn, if it takes no branch out."""

    instructions: int
    counts: Mapping[str, int]
    """By the first part of the instruction's name: SHFL (between threads of a warp), BAR (waits for the program's other
    warps), FMUL, HMMA and HGMMA (matrix products), LDG and LDGSTS (loads), LDL and STL (spilled registers)."""
    narrow_loads: int
    """Loads of 1 or 2 bytes a thread."""


def innermost_loops(cubin: bytes) -> list[Loop]:
    """The loops of a kernel that hold no other, by backward branches; those of a few instructions, which wait, are left
    out."""
    code = _code(cubin)
    found = sorted(set(_spans(code)), key=lambda span: span[1] - span[0])
    inner: list[tuple[int, int]] = []
    for first, last in found:
        if not any(first <= begin and end <= last for begin, end in inner):
            inner.append((first, last))
    loops = [_loop([name for place, name, _ in code if first <= place <= last]) for first, last in sorted(inner)]
    return [loop for loop in loops if loop.instructions >= _SHORTEST]


def whole_kernel(cubin: bytes) -> Loop:
    """All of it as if it were one turn: for kernels without loops."""
    return _loop([name for _, name, _ in _code(cubin) if name != "NOP"])


def _code(cubin: bytes) -> list[tuple[int, str, str]]:
    """Address, name and operands of each instruction."""
    found = _INSTRUCTION.findall(inspect_cubin(cubin, "--dump-sass"))
    return [(int(place, 16), name, rest) for place, name, rest in found]


def _spans(code: list[tuple[int, str, str]]) -> Iterator[tuple[int, int]]:
    """First and last address of each loop."""
    for place, name, rest in code:
        target = _TARGET.search(rest)
        if name.startswith("BRA") and target is not None and int(target[1], 16) < place:
            yield int(target[1], 16), place


def _loop(names: list[str]) -> Loop:
    counts = Counter(name.partition(".")[0] for name in names)
    return Loop(len(names), counts, sum(_NARROW.match(name) is not None for name in names))
