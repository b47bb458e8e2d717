"""What the second copy of a tied table of embeddings buys: the output layer over plain weights and over packed ones.

python benchmarks/tied_table.py --threads 2
"""

from __future__ import annotations

import argparse

import torch
from packed_formats import milliseconds

from dovetail.nn.kernels import PackedLinear, TorchLinear


def main() -> None:
    """Prints one row per dtype and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=2, default=(131072, 640), help="vocabulary and hidden size")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 2, 4, 8, 32, 128))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| dtype | rows | plain, ms | packed, ms | ratio |\n| --- | --- | --- | --- | --- |")
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.randn(arguments.size).to(dtype)
            plain, packed = TorchLinear(weight), PackedLinear(weight)
            packed.finish()
            for rows in arguments.rows:
                x = torch.randn(rows, arguments.size[1]).to(dtype)
                both = [
                    milliseconds(lambda kernel=kernel, x=x: kernel.apply(x, None), 15) for kernel in (plain, packed)
                ]
                print(f"| {dtype} | {rows} | {both[0]:.2f} | {both[1]:.2f} | {both[0] / both[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
