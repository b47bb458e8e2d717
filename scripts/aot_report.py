"""Compiles the attention kernels of `paged_triton` ahead of time and prints what they take: registers and stack of a
thread (bytes; spilled registers among them), and shared memory.

Needs Triton but no GPU. Run::

    python scripts/aot_report.py                  # stored configs on sm_80, sm_90, sm_100, bfloat16 pages
    python scripts/aot_report.py --kv-dtype int8 --arch 90 --head-size 128
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from dovetail.attention_backends.paged_triton.aot import Variant, attend_launch, merge_launch, write_launch
from dovetail.attention_backends.paged_triton.configs import KINDS, find_config
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.nn.triton_launch import Launch
from dovetail.testing.triton_aot import compile_launch


def launches(variant: Variant, arch: int) -> Iterator[tuple[Launch, str]]:
    """Every kernel for one architecture and variant, and its config in words."""
    head_pad = 1 << max(4, (variant.head_size - 1).bit_length())
    for kind in KINDS:
        config = find_config(arch, head_pad, DTYPE_BYTES[variant.kv_dtype], kind)
        text = f"{config.block_m}x{config.block_n} warps={config.num_warps} stages={config.num_stages}"
        yield attend_launch(variant, config), text
        if kind == "verify":
            yield merge_launch(variant), ""
    yield write_launch(variant), ""
    yield write_launch(variant, rotary=variant.head_size), "rotates"


def main() -> None:
    parser = argparse.ArgumentParser(description="Registers, shared memory and stack of the attention kernels.")
    parser.add_argument("--arch", type=int, action="append", help="default: 80, 90 and 100")
    parser.add_argument("--head-size", type=int, action="append", help="default: 64, 128 and 256")
    parser.add_argument("--dtype", default="bfloat16", help="of queries")
    parser.add_argument("--kv-dtype", action="append", help="of pages; default: bfloat16")
    parser.add_argument("--feature", action="append", default=[], choices=["window", "cap", "slopes", "sinks"])
    arguments = parser.parse_args()
    base = Variant(dtype=arguments.dtype, features=frozenset(arguments.feature))
    print(f"{'arch':>4} {'head':>4} {'pages':14} {'kernel':15} {'config':26} {'regs':>4} {'shared':>7} {'stack':>7}")
    for arch in arguments.arch or [80, 90, 100]:
        for kv_dtype in arguments.kv_dtype or ["bfloat16"]:
            for head_size in arguments.head_size or [64, 128, 256]:
                variant = replace(base, kv_dtype=kv_dtype, head_size=head_size)
                for launch, config in launches(variant, arch):
                    used = compile_launch(launch, arch)
                    print(
                        f"{arch:4} {head_size:4} {kv_dtype:14} {launch.name:15} {config:26} {used.registers:4} "
                        f"{used.shared_bytes:7} {used.stack_bytes:7}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
