"""How the time of block-sparse attention falls with the share of key blocks that are read, on the CPU.

One layer of SmolLM2-135M's shape. Every density is compared with all blocks through the same code, and with `paged_cpu`
where this machine compiles it. Run::

    python benchmarks/block_sparse_cpu.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from dovetail.attention_backends.block_sparse.backend import BlockSparseBackend
from dovetail.attention_backends.block_sparse.pattern import BlockPattern, BlockSparseOptions, VisibleBlocks
from dovetail.attention_backends.paged_cpu.backend import PagedCPUBackend
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, AttentionSetup
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.testing.attention_cases import make_batch

BLOCK_SIZE, SPARSE_BLOCK = 16, 64
WORKLOADS = {
    "decode, 8 x 8192 keys": [(8191, 1)] * 8,
    "decode, 1 x 16384 keys": [(16383, 1)],
    "prefill, 4096 tokens": [(0, 4096)],
}
PATTERNS: list[tuple[int, int | None]] = [(10**6, None), (16, 2), (16, 4), (8, 8), (4, 16), (4, None), (1, None)]
"""(local_blocks, vert_stride), from all blocks to one."""


def density(options: BlockSparseOptions, requests: list[tuple[int, int]]) -> float:
    """Blocks that are read for each query block, out of those before it."""
    blocks = [
        block
        for cached, new in requests
        for block in range(cached // SPARSE_BLOCK, (cached + new - 1) // SPARSE_BLOCK + 1)
    ]
    lists = VisibleBlocks(BlockPattern.of(options), (0,), 1).lists(np.array(blocks))
    return float(lists.counts.sum()) / sum(block + 1 for block in blocks)


def measure(backend: AttentionBackend, requests: list[tuple[int, int]], steps: int) -> tuple[float, float]:
    """Medians in milliseconds: forward, and plan."""
    setup = backend.setup
    counts = [-(-(cached + new) // BLOCK_SIZE) for cached, new in requests]
    ids, ends = 1 + np.random.default_rng(0).permutation(sum(counts)), np.cumsum(counts)
    rows = [
        (ids[end - count : end].tolist(), cached, cached + new)
        for (cached, new), count, end in zip(requests, counts, ends, strict=True)
    ]
    [layer] = setup.layers
    cache = torch.randn(backend.kv_cache_shape(len(ids) + 1)).to(getattr(torch, setup.spec.dtype))
    num_tokens = sum(new for _, new in requests)
    dtype: torch.dtype = getattr(torch, setup.dtype)
    query, key, value = (torch.randn(num_tokens, heads, layer.head_size).to(dtype) for heads in (9, 3, 3))
    batch = make_batch(rows, setup)
    plans, forwards = [], []
    for _ in range(steps):
        start = time.perf_counter()
        backend.plan(batch)
        planned = time.perf_counter()
        backend.forward(layer, query, key, value, cache)
        plans.append(planned - start)
        forwards.append(time.perf_counter() - planned)
    return statistics.median(forwards) * 1e3, statistics.median(plans) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Block-sparse attention on the CPU: time against density.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    layer = AttentionLayer(0, 9, 3, 64, 64**-0.5)
    setup = AttentionSetup(
        (layer,),
        KVSpec(num_kv_heads=3, head_size=64, dtype=arguments.dtype),
        BLOCK_SIZE,
        arguments.dtype,
        "cpu",
        8,
        8192,
        16384,
    )
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.dtype}, medians of {arguments.steps}")
    print(
        f"{'workload':24} {'local':>7} {'stride':>6} {'density':>8} {'forward ms':>11} {'of dense':>9} {'plan ms':>8}"
    )
    with torch.inference_mode():
        for name, requests in WORKLOADS.items():
            dense = None
            for local, stride in PATTERNS:
                options = BlockSparseOptions(local_blocks=local, vert_stride=stride, sparse_block_size=SPARSE_BLOCK)
                forward, plan = measure(BlockSparseBackend(options, setup), requests, arguments.steps)
                dense = dense or forward
                print(
                    f"{name:24} {local if local < 10**6 else 'all':>7} {stride or '-':>6} "
                    f"{density(options, requests):8.3f} {forward:11.2f} {forward / dense:9.3f} {plan:8.2f}",
                    flush=True,
                )
            need = AttentionNeed("cpu", arguments.dtype, BLOCK_SIZE, frozenset({64}))
            if not reasons_against(
                PagedCPUBackend, need, PluginOptions(), Environment("cpu", arguments.threads, 2**33)
            ):
                forward, plan = measure(PagedCPUBackend(PluginOptions(), setup), requests, arguments.steps)
                print(f"{name:24} {'paged_cpu, all keys':>23} {forward:11.2f} {forward / dense:9.3f} {plan:8.2f}")


if __name__ == "__main__":
    main()
