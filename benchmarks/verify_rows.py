"""What the linear layers of a forward pass take for 1 to 9 rows: verifying k drafts of a request takes k + 1 of them.

    python benchmarks/verify_rows.py [--types Q4_1,Q8_0] [--hidden 576 --intermediate 1536 --layers 30] [--threads 2]

Weights are random blocks of a GGUF type. Numbers of rows take turns, pass by pass, over the same layers, whose weights
together should be larger than caches. Printed, in milliseconds: the fastest call of each layer, summed over the layers
(a disturbed call costs its layer one sample), in brackets the same of median calls, and the former over four rows'.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from dovetail.contracts.quantization import LinearShape
from dovetail.nn.huge_pages import WeightMemory
from dovetail.plugins.quantization.grouped.kernel import GroupedLinear
from dovetail.testing.packed_blocks import random_blocks

NUM_ROWS = range(1, 10)


def layers_of(name: str, hidden: int, intermediate: int, count: int) -> list[tuple[GroupedLinear, int]]:
    """The linear layers of `count` decoder layers with their input sizes, all layers with the same random blocks."""
    size = random_blocks(name, 1, num_blocks=1, seed=0).shape[1]
    shapes = [(hidden * 5 // 3, hidden), (hidden, hidden), (2 * intermediate, hidden), (hidden, intermediate)]
    packed = [random_blocks(name, rows, num_blocks=-(-columns // size), seed=1) for rows, columns in shapes]
    memory = WeightMemory()
    layers = []
    for _ in range(count):
        for one in packed:
            rows, columns = one.shape
            kernel = GroupedLinear(LinearShape("layer", columns, rows, has_bias=False), memory)
            kernel.load(slice(0, rows), one)
            kernel.finish()
            layers.append((kernel, columns))
    return layers


def measure(layers: list[tuple[GroupedLinear, int]], num_passes: int) -> dict[int, list[list[float]]]:
    """Milliseconds of each call, by number of rows and layer."""
    inputs = {columns: torch.randn(max(NUM_ROWS), columns) for columns in {columns for _, columns in layers}}
    found: dict[int, list[list[float]]] = {num_rows: [[] for _ in layers] for num_rows in NUM_ROWS}
    for _ in range(num_passes):
        for num_rows in NUM_ROWS:
            for times, (kernel, columns) in zip(found[num_rows], layers, strict=True):
                started = time.perf_counter()
                kernel.apply(inputs[columns][:num_rows], None)
                times.append(1e3 * (time.perf_counter() - started))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q4_0,Q4_1,Q4_K,Q5_K,Q6_K,Q8_0,IQ4_NL")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"| type, {options.threads} threads | " + " | ".join(f"{n} rows" for n in NUM_ROWS) + " |")
    print("| --- " * (len(NUM_ROWS) + 1) + "|")
    for name in options.types.split(","):
        times = measure(layers_of(name, options.hidden, options.intermediate, options.layers), options.passes)
        least = {num_rows: sum(map(min, found)) for num_rows, found in times.items()}
        middle = {num_rows: sum(map(median, found)) for num_rows, found in times.items()}
        cells = [f"{least[n]:.2f} ({middle[n]:.2f}), {least[n] / least[4]:.2f}x" for n in NUM_ROWS]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
