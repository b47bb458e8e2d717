"""Time per layer of the attention backends on the CPU, for the shape of SmolLM2-135M.

Every layer has a cache of its own, so that keys and values come from memory as they do in a model. Run::

    python benchmarks/attention_cpu.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.attention_backends.paged_cpu.backend import PagedCPUBackend
from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.attention_backends.sdpa import SDPABackend
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, AttentionSetup
from dovetail.contracts.kv import KVSpec
from dovetail.testing.attention_cases import make_batch

BLOCK_SIZE = 16
NUM_LAYERS = 30


@dataclass(frozen=True)
class Workload:
    """Requests of one step, as (cached tokens, new tokens)."""

    name: str
    requests: list[tuple[int, int]]
    with_reference: bool = True
    num_shared: int = 0
    """Leading tokens, in whole blocks, that all requests have in common."""


def workloads() -> list[Workload]:
    spread = np.linspace(256, 640, 32).astype(int).tolist()
    return [
        Workload("decode, 1 x 256 keys", [(255, 1)]),
        Workload("decode, 1 x 4096 keys", [(4095, 1)]),
        Workload("decode, 32 x 256 keys", [(255, 1)] * 32),
        Workload("decode, 32 x 256..640 keys", [(length - 1, 1) for length in spread]),
        Workload("decode, 64 x 640 keys", [(639, 1)] * 64),
        Workload("decode, 64 x 640 keys, 512 shared", [(639, 1)] * 64, num_shared=512),
        Workload("verify, 32 x 5 of 256 keys", [(251, 5)] * 32),
        Workload("prefill, 1024 tokens", [(0, 1024)], with_reference=False),
        Workload("prefill, 32 x 128 tokens", [(0, 128)] * 32, with_reference=False),
        Workload("chunk, 64 of 900 tokens", [(836, 64)]),
        Workload("chunk 64 of 900 + decode 31 x 256", [(836, 64)] + [(255, 1)] * 31),
    ]


def setup_for(dtype: str, kv_dtype: str) -> AttentionSetup:
    layers = tuple(AttentionLayer(i, 9, 3, 64, 64**-0.5) for i in range(NUM_LAYERS))
    return AttentionSetup(
        layers, KVSpec(num_kv_heads=3, head_size=64, dtype=kv_dtype), BLOCK_SIZE, dtype, "cpu", 64, 8192, 8192
    )


def measure(backend: AttentionBackend, workload: Workload, steps: int) -> tuple[float, float]:
    """Medians in µs: one layer's forward, and one step's plan."""
    setup, rng = backend.setup, np.random.default_rng(0)
    lengths = [cached + new for cached, new in workload.requests]
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    ids = 1 + rng.permutation(sum(counts))
    ends = np.cumsum(counts)
    shared = ids[: workload.num_shared // BLOCK_SIZE].tolist()
    rows = [
        (shared + ids[end - count + len(shared) : end].tolist(), cached, cached + new)
        for (cached, new), count, end in zip(workload.requests, counts, ends, strict=True)
    ]
    batch = make_batch(rows, setup)
    dtype: torch.dtype = getattr(torch, setup.dtype)
    kv_dtype: torch.dtype = getattr(torch, setup.spec.dtype)
    caches = [torch.randn(backend.kv_cache_shape(len(ids) + 1)).to(kv_dtype) for _ in setup.layers]
    num_tokens = sum(new for _, new in workload.requests)
    fused = torch.randn(num_tokens, 15, 64).to(dtype)
    query, key, value = fused[:, :9], fused[:, 9:12], fused[:, 12:]
    plans, forwards = [], []
    for _ in range(steps):
        start = time.perf_counter()
        backend.plan(batch)
        planned = time.perf_counter()
        for layer, cache in zip(setup.layers, caches, strict=True):
            backend.forward(layer, query, key, value, cache)
        plans.append(planned - start)
        forwards.append((time.perf_counter() - planned) / NUM_LAYERS)
    return statistics.median(forwards) * 1e6, statistics.median(plans) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Time per layer of the attention backends on the CPU.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dtype", action="append", help="default: bfloat16 and float32")
    parser.add_argument("--kv-dtype", help="of the pages; default: the same")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, medians of {arguments.steps} steps, µs")
    heads = [
        f"{name + part:>{width}}" for name, width in (("paged_cpu", 15), ("sdpa", 11)) for part in ("/layer", " plan")
    ]
    print(f"{'workload':36} {'dtype':9} {' '.join(heads)} {'reference/layer':>16}")
    with torch.inference_mode():
        for dtype in arguments.dtype or ["bfloat16", "float32"]:
            setup = setup_for(dtype, arguments.kv_dtype or dtype)
            for workload in workloads():
                if arguments.only in workload.name:
                    print(f"{workload.name:36} {dtype:9} {' '.join(row(setup, workload, arguments.steps))}", flush=True)


def row(setup: AttentionSetup, workload: Workload, steps: int) -> list[str]:
    """The figures of one workload; "-" where a backend does not serve the dtype of the pages, or would take long."""
    cells = []
    for backend, width in ((PagedCPUBackend, 15), (SDPABackend, 11)):
        if setup.spec.dtype in (backend.capabilities.kv_dtypes or {setup.dtype}):
            times = measure(backend(backend.Options(), setup), workload, steps)
            cells += [f"{time_us:{width}.0f}" for time_us in times]
        else:
            cells += [f"{'-':>{width}}"] * 2
    if not workload.with_reference or setup.spec.dtype not in (ReferenceBackend.capabilities.kv_dtypes or ()):
        return [*cells, f"{'-':>16}"]
    reference = measure(ReferenceBackend(ReferenceBackend.Options(), setup), workload, steps=3)
    return [*cells, f"{reference[0]:16.0f}"]


if __name__ == "__main__":
    main()
