"""How long a linear layer takes in each of GGUF's packed formats, beside Q4_K.

python benchmarks/packed_formats.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from dovetail.contracts.quantization import LinearShape
from dovetail.nn.huge_pages import WeightMemory
from dovetail.plugins.quantization.grouped.formats import GROUP_FORMATS
from dovetail.plugins.quantization.grouped.kernel import GroupedLinear
from dovetail.testing.packed_blocks import random_blocks

BESIDE = "Q4_K"


def main() -> None:
    """Prints one row per format: bits, milliseconds, and the ratio to `BESIDE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=2, default=(8192, 2048), help="output and input features")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 4, 32, 256), help="rows of activations")
    parser.add_argument("--formats", nargs="+", default=sorted(GROUP_FORMATS))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = {name: loaded(name, *arguments.size) for name in dict.fromkeys((BESIDE, *arguments.formats))}
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.repeats):
        for name, kernel in kernels.items():
            for rows in arguments.rows:
                x = torch.randn(rows, arguments.size[1])
                taken = milliseconds(lambda kernel=kernel, x=x: kernel.apply(x, None), 30 if rows < 32 else 6)
                times.setdefault((name, rows), []).append(taken)
    header = ["format", "bits in the file", "bits held", *(f"{rows} rows" for rows in arguments.rows)]
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header))
    for name in kernels:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        cells = [name, f"{8 * block_bytes / block:g}", f"{8 * GROUP_FORMATS[name].bytes_per_weight():g}"]
        for rows in arguments.rows:
            median = statistics.median(times[name, rows])
            cells.append(f"{median:.3f} ({median / statistics.median(times[BESIDE, rows]):.2f})")
        print("| " + " | ".join(cells) + " |")


def loaded(name: str, rows: int, columns: int) -> GroupedLinear:
    """A layer of random blocks."""
    kernel = GroupedLinear(LinearShape("layer", columns, rows, has_bias=False), WeightMemory())
    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    kernel.load(slice(0, rows), random_blocks(name, rows, columns // block, seed=1))
    kernel.finish()
    return kernel


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` calls, after one that does not count."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


if __name__ == "__main__":
    main()
