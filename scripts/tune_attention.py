"""Measures tile sizes of `paged_triton` on this GPU and writes the fastest to its configs.json.

Serving never searches: it reads that file. Entries of other architectures stay. Run on each kind of GPU::

    python scripts/tune_attention.py                       # bfloat16 pages, head sizes 64, 128 and 256
    python scripts/tune_attention.py --kv-dtype float8_e4m3fn --head-size 128 --dry-run
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parent / "gpu_check"))
from measured import captured, time_us

from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.attention_backends.paged_triton.configs import KINDS, KernelConfig, stored_configs, write_configs
from dovetail.attention_backends.paged_triton.launch import Launcher
from dovetail.attention_backends.paged_triton.machine import device_facts
from dovetail.contracts.attention import AttentionLayer, AttentionSetup
from dovetail.contracts.kv import KVSpec
from dovetail.testing.attention_cases import make_batch

STEPS = {
    "decode": [[(8191, 1)] * 32, [(1023, 1)] * 64],
    "verify": [[(4095, 5)] * 32],
    "prefill": [[(0, 4096)], [(8192, 2048)]],
}
"""Requests (cached tokens, new tokens) of the steps that a kind is measured with; their times are added."""
KV_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


def candidates(kind: str, arch: int, head_size: int, kv_bytes: int) -> Iterator[KernelConfig]:
    """Tile sizes worth a try."""
    rows = {"decode": (16,), "verify": (32, 64), "prefill": (64, 128)}[kind]
    for block_m, block_n, warps, stages in itertools.product(rows, (32, 64, 128), (4, 8), (2, 3, 5, 7)):
        yield KernelConfig(arch, head_size, kv_bytes, kind, block_m, block_n, warps, stages)


def setup_for(head_size: int, dtype: str, kv_dtype: str) -> AttentionSetup:
    layer = AttentionLayer(0, 32, 8, head_size, head_size**-0.5)
    return AttentionSetup(
        (layer,), KVSpec(num_kv_heads=8, head_size=head_size, dtype=kv_dtype), 16, dtype, "cuda", 64, 16384, 16384
    )


def measure(setup: AttentionSetup, config: KernelConfig) -> float:
    """Microseconds of all steps of the config's kind; infinite where it does not fit the device."""
    try:
        return sum(time_step(setup, requests, config) for requests in STEPS[config.kind])
    except OutOfResources:
        return float("inf")


class Candidate(PagedTritonBackend):
    """The backend with one config for all kinds of rows."""

    def __init__(self, setup: AttentionSetup, config: KernelConfig):
        self._config = config
        super().__init__(PagedTritonBackend.Options(), setup)

    def _create_launcher(self, setup: AttentionSetup, arch: int) -> Launcher:
        return Launcher(setup, arch, tuple(replace(self._config, kind=kind) for kind in KINDS))


def time_step(setup: AttentionSetup, requests: list[tuple[int, int]], config: KernelConfig, repeats: int = 10) -> float:
    """Median microseconds of one layer."""
    backend = Candidate(setup, config)
    counts = [-(-(cached + new) // setup.block_size) for cached, new in requests]
    ids, ends = 1 + np.random.default_rng(0).permutation(sum(counts)), np.cumsum(counts)
    rows = [
        (ids[end - count : end].tolist(), cached, cached + new)
        for (cached, new), count, end in zip(requests, counts, ends, strict=True)
    ]
    cache = torch.empty(
        backend.kv_cache_shape(len(ids) + 1), dtype=getattr(torch, setup.spec.dtype), device=setup.device
    )
    cache.view(torch.uint8).random_(0, 64)  # small finite numbers of every dtype: zeros are faster
    [layer] = setup.layers
    num_tokens = sum(new for _, new in requests)
    dtype: torch.dtype = getattr(torch, setup.dtype)
    query, key, value = (
        torch.randn(num_tokens, heads, layer.head_size, device=setup.device).to(dtype)
        for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    )
    backend.plan(make_batch(rows, setup))
    # As a graph: the host's time for three launches would hide the device's.
    return time_us(captured(lambda: backend.forward(layer, query, key, value, cache)), repeats)


def tune(setup: AttentionSetup, kind: str, arch: int) -> KernelConfig:
    """The fastest candidate of one kind; prints each."""
    width = KV_BYTES[setup.spec.dtype]
    best, best_time = None, float("inf")
    for config in candidates(kind, arch, setup.spec.head_size, width):
        took = measure(setup, config)
        print(f"  {kind:8} {config.block_m:3}x{config.block_n:<3} warps={config.num_warps} stages={config.num_stages} "
              f"{took:10.1f} us", flush=True)  # fmt: skip
        if took < best_time:
            best, best_time = config, took
    if best is None:
        raise SystemExit(f"no candidate fits this GPU: {kind}, head size {setup.spec.head_size}")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the attention kernels of paged_triton on this GPU.")
    parser.add_argument("--head-size", type=int, action="append", help="default: 64, 128 and 256")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=sorted(KV_BYTES))
    parser.add_argument("--dry-run", action="store_true", help="print, but write nothing")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("No CUDA GPU: there is nothing to tune on.")
    arch = device_facts(torch.device("cuda"))[1]
    entries = {config.key: config for config in stored_configs()}
    for head_size in arguments.head_size or [64, 128, 256]:
        setup = setup_for(head_size, arguments.dtype, arguments.kv_dtype)
        for kind in arguments.kind or KINDS:
            best = tune(setup, kind, arch)
            entries[best.key] = best
            print(f"sm_{arch} head size {head_size}, {arguments.kv_dtype}: {best}", flush=True)
    if not arguments.dry_run:
        write_configs(list(entries.values()))


if __name__ == "__main__":
    main()
