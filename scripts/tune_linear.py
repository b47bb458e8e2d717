"""Measures tile sizes of the kernels that multiply quantized weights with few tokens, over the layers of an 8B model::

    python scripts/tune_linear.py                       # int4, int8, fp8 and w8a8; prints the fastest of each
    python scripts/tune_linear.py int4 --rows 1 64

Nothing is written: the constants are in `tile_sizes` of each method's module, and in plugins/quantization/parts.py.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parent / "gpu_check"))
from common import device_seconds

from dovetail.plugins.quantization import int8_kernel, parts
from dovetail.plugins.quantization.int4 import method as int4
from dovetail.plugins.quantization.w8a8 import fused

LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""out_features and in_features of one decoder layer; together more bytes than a GPU's cache holds."""
GROUP = 128
PROGRAMS = (132, 264, 528, 1056)
Sizes = dict[str, int]
Work = Callable[[], Any]


def sizes_of(method: str, rows: int) -> Iterator[Sizes]:
    """Candidates: tiles that hold all tokens."""
    height = next(height for height in (16, 32, 64, 128) if rows <= height)
    depths = {"int4": (64, 128), "int8": (64, 128, 256), "fp8": (128, 256), "w8a8": (128, 256)}[method]
    columns = (32, 64, 128) if method in ("int4", "int8") else (64, 128)
    for wide, depth, warps, stages in itertools.product(columns, depths, (4, 8), (3, 4, 6)):
        sizes = {"ROWS": height, "COLUMNS": wide, "DEPTH": depth, "num_warps": warps, "num_stages": stages}
        yield sizes | ({"GROUP": GROUP} if method == "int4" else {})


def works(method: str, rows: int, device: str, layers: tuple[tuple[int, int], ...] = LAYERS) -> list[Work]:
    """One product for each layer."""
    return [WORKS[method](rows, *layer, device) for layer in layers]


def int4_work(rows: int, out_features: int, in_features: int, device: str) -> Work:
    groups = in_features // GROUP
    nibbles = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(groups, out_features, device=device).half()
    zeros = torch.randint(0, 16, (groups, out_features), device=device).half()
    x = torch.randn(rows, in_features, device=device).bfloat16()
    return partial(int4._Packed(nibbles, scales, zeros, GROUP).multiplied, x)


def int8_work(rows: int, out_features: int, in_features: int, device: str) -> Work:
    weights = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8, device=device)
    x = torch.randn(rows, in_features, device=device).bfloat16()
    return partial(int8_kernel.multiplied, x, weights, torch.rand(out_features, device=device))


def eight_bit_work(dtype: torch.dtype, rows: int, out_features: int, in_features: int, device: str) -> Work:
    """The product alone."""
    values, weights = (
        torch.randint(-100, 101, (size, in_features), device=device).to(dtype) for size in (rows, out_features)
    )
    return partial(fused.few_rows_products, values, weights)


WORKS: dict[str, Callable[..., Work]] = {
    "int4": int4_work,
    "int8": int8_work,
    "fp8": partial(eight_bit_work, torch.float8_e4m3fn),
    "w8a8": partial(eight_bit_work, torch.int8),
}
MODULES: dict[str, Any] = {"int4": int4, "int8": int8_kernel, "fp8": fused, "w8a8": fused}


def tune(method: str, rows: int) -> None:
    """Prints the fastest candidates."""
    found: list[tuple[float, int, Sizes]] = []
    given = works(method, rows, "cuda")
    for sizes in sizes_of(method, rows):
        MODULES[method].tile_sizes = lambda *_, sizes=sizes: sizes
        for programs in PROGRAMS:
            parts._PROGRAMS = programs
            try:
                found.append((1e6 * device_seconds(given, "cuda", least=0.008, repeats=5), programs, sizes))
            except OutOfResources:
                break
    found.sort(key=lambda entry: entry[0])
    for took, programs, sizes in found[:6]:
        print(f"{method:5} {rows:3} rows: {took:7.1f} us a layer, {programs:4} programs, {sizes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the kernels of quantized weights on this GPU.")
    parser.add_argument("methods", nargs="*", choices=[*WORKS, []], help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("No CUDA GPU: there is nothing to tune on.")
    for method in arguments.methods or WORKS:
        for rows in arguments.rows:
            tune(method, rows)


if __name__ == "__main__":
    main()
