"""Proves the attention backends on a GPU: correctness against `reference` first, then speed against the roofline.

Prints a table, and one JSON object a line for machines. Ends with status 1 where a backend is wrong. Run::

    python scripts/gpu_check/attention.py            # what decides most: bfloat16, pages of one byte, then speed
    python scripts/gpu_check/attention.py --tail     # each feature, the other dtypes and the other backends
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import latents
import numpy as np
import torch
from measured import TOLERANCES, Check, Speed, captured, copy_bandwidth, matrix_rate, time_us

from dovetail.attention_backends.block_sparse.backend import BlockSparseBackend
from dovetail.attention_backends.flash.backend import FlashBackend
from dovetail.attention_backends.flash_prefill import FlashPrefillBackend
from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend, page_shape
from dovetail.attention_backends.paged_triton.machine import device_facts
from dovetail.attention_backends.paged_triton.passes import Passes
from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.attention import AttentionBackend, AttentionLayer, AttentionNeed, AttentionSetup
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment, PluginOptions
from dovetail.nn.operators import torch_operators
from dovetail.testing.attention_cases import AttentionCase, CaseShape, make_batch, random_case

DEVICE = "cuda"
GOALS = {"decode": 0.85, "prefill": 0.60, "write": 0.70}
"""Shares of the measured copy bandwidth; of the measured matrix-product rate for prefill."""


def environment() -> Environment:
    properties = torch.cuda.get_device_properties(0)
    device = DeviceInfo(properties.name, properties.total_memory, (properties.major, properties.minor))
    return Environment("cuda", 1, 2**36, devices=(device,))


def against(backend: type[AttentionBackend], setup: AttentionSetup, options: Any, trees: bool = False) -> list[str]:
    """What the backend has against a setup."""
    layer = setup.layers[0]
    need = AttentionNeed(
        "cuda",
        setup.dtype,
        setup.block_size,
        frozenset({layer.head_size}),
        sliding_window=layer.window is not None,
        soft_cap=layer.soft_cap is not None,
        alibi=layer.alibi_slopes is not None,
        trees=trees,
        kv_dtype=setup.spec.dtype,
        sinks=layer.sinks is not None,
    )
    return reasons_against(backend, need, options, environment())


# --- correctness --------------------------------------------------------------------------------------------

FEATURES: dict[str, dict[str, bool]] = {
    "plain": {},
    "window": {"has_window": True},
    "soft cap": {"has_soft_cap": True},
    "ALiBi": {"has_alibi": True},
    "trees": {"has_trees": True},
    "trees, window": {"has_trees": True, "has_window": True},
    "sinks, window": {"has_sinks": True, "has_window": True},
}


def on_cpu(case: AttentionCase) -> torch.Tensor:
    """What `reference` says of a case, over pages that hold what those of the case hold (fp8 and int8: about)."""
    dtype = case.setup.spec.dtype
    wide = dtype if dtype in ("float32", "float16", "bfloat16") else case.setup.dtype
    layers = tuple(
        replace(layer, sinks=None if layer.sinks is None else layer.sinks.cpu()) for layer in case.setup.layers
    )
    setup = replace(case.setup, device="cpu", layers=layers, spec=replace(case.setup.spec, dtype=wide))
    case = replace(case, setup=setup)
    return case.run_from_scratch(ReferenceBackend(ReferenceBackend.Options(), case.setup)).float()


SHAPES = ((128, 16, False), (64, 32, True), (80, 16, False), (256, 64, False), (96, 128, True))
"""head_size, block_size, and whether keys are many: each is a kernel of its own, and a kernel takes a second to
compile, so that only plain bfloat16 has them all."""
ROTATIONS = ((128, 128), (64, 32), (80, 20), (256, 256))
"""head_size, and how many elements of it turn."""


@dataclass(frozen=True)
class Wanted:
    """What one row compares: random steps of each shape, or, with `rotations`, rotating while pages are written."""

    backend: type[AttentionBackend]
    dtype: str
    kv_dtype: str
    feature: str = "plain"
    shapes: tuple[tuple[int, int, bool], ...] = ()
    rotations: tuple[tuple[int, int], ...] = ()

    @property
    def options(self) -> Any:
        chosen = {"local_blocks": 1000, "sparse_block_size": 128} if self.backend is BlockSparseBackend else {}
        return self.backend.Options(**chosen)

    def cases(self) -> Iterator[AttentionCase]:
        """Random steps."""
        for head_size, block_size, is_long in self.shapes:
            shape = CaseShape(
                dtype=self.dtype,
                device=DEVICE,
                head_size=head_size,
                block_size=block_size,
                max_requests=4,
                max_cached=3000 if is_long else 200,
                max_query=600 if is_long else 40,
                **FEATURES[self.feature],
            )
            yield self._over_pages(random_case(SHAPES.index((head_size, block_size, is_long)), shape))
        for head_size, _ in self.rotations:
            shape = CaseShape(dtype=self.dtype, device=DEVICE, head_size=head_size, block_size=16)
            yield self._over_pages(random_case(head_size, shape))

    def _over_pages(self, case: AttentionCase) -> AttentionCase:
        return replace(case, setup=replace(case.setup, spec=replace(case.setup.spec, dtype=self.kv_dtype)))


def first_rows() -> Iterator[Wanted]:
    """What most models need: without it nothing else matters."""
    yield Wanted(PagedTritonBackend, "bfloat16", "bfloat16", shapes=SHAPES)
    for kv_dtype in ("float8_e4m3fn", "int8", "float8_e5m2"):
        yield Wanted(PagedTritonBackend, "bfloat16", kv_dtype, shapes=SHAPES[:2])
    for kv_dtype in ("bfloat16", "float8_e4m3fn", "int8"):
        yield Wanted(PagedTritonBackend, "bfloat16", kv_dtype, rotations=ROTATIONS[:2])


def tail_rows() -> Iterator[Wanted]:
    """Each feature and dtype once, in shapes that differ, and the other backends."""
    for index, feature in enumerate(FEATURES):
        if feature != "plain":
            yield Wanted(PagedTritonBackend, "bfloat16", "bfloat16", feature, SHAPES[index % 2 : index % 2 + 1])
    for dtype in ("float16", "float32"):
        yield Wanted(PagedTritonBackend, dtype, dtype, shapes=SHAPES[:1])
        yield Wanted(PagedTritonBackend, dtype, dtype, "trees, window", SHAPES[1:2])
        yield Wanted(PagedTritonBackend, dtype, dtype, rotations=ROTATIONS[2:])
    for dtype in ("bfloat16", "float16", "float32"):
        for feature in FEATURES:
            yield Wanted(FlashBackend, dtype, dtype, feature, SHAPES)
            yield Wanted(FlashPrefillBackend, dtype, dtype, feature, SHAPES[:1])
    yield Wanted(BlockSparseBackend, "bfloat16", "bfloat16", shapes=SHAPES[:2])
    yield Wanted(BlockSparseBackend, "float16", "float16", shapes=SHAPES[2:3])


def compare(wanted: Wanted) -> Check | None:
    """None where the backend does not serve what is wanted."""
    worst, passed = 0.0, True
    slack = {"int8": 0.05, "float8_e4m3fn": 0.3, "float8_e5m2": 0.6}.get(wanted.kv_dtype, 0.0)
    for place, case in enumerate(wanted.cases()):
        if against(wanted.backend, case.setup, wanted.options, trees="trees" in wanted.feature):
            return None
        backend = wanted.backend(wanted.options, case.setup)
        if wanted.rotations:
            error, is_same = rotation_error(case, backend, wanted.rotations[place][1])
            worst, passed = max(worst, error), passed and is_same
        else:
            worst = max(worst, float((case.run_from_scratch(backend).float().cpu() - on_cpu(case)).abs().max()))
    feature = "rotation" if wanted.rotations else wanted.feature
    passed = passed and (bool(wanted.rotations) or worst <= TOLERANCES[wanted.dtype] + slack)
    return Check(wanted.backend.__name__, wanted.dtype, wanted.kv_dtype, feature, worst, passed)


def rotation_error(case: AttentionCase, backend: Any, rotary: int) -> tuple[float, bool]:
    """Results and pages of `rotate_and_forward` against those of torch's rotation and `forward`: the same bits."""
    rotate = torch_operators().rotate
    query, key, value = case.inputs()
    cos, sin = torch.randn(len(query), 2, 1, rotary, device=DEVICE).to(query.dtype).unbind(1)
    caches = [case.filled_cache(backend) for _ in range(2)]
    backend.plan(case.batch())
    expected = backend.forward(case.layer, rotate(query, cos, sin), rotate(key, cos, sin), value, caches[0])
    actual = backend.rotate_and_forward(case.layer, query, key, value, cos, sin, caches[1])
    is_same = torch.equal(actual, expected) and torch.equal(*(cache.view(torch.uint8) for cache in caches))
    return float((actual - expected).abs().max()), is_same


def compare_invariance(dtype: str) -> Check:
    """Rows of a request alone and in chunks against the same rows with others: the same bits."""
    lengths = ((1, 1100), (300, 700), (40, 20), (5, 2000))
    case = random_case(0, CaseShape(dtype=dtype, device=DEVICE, head_size=128, block_size=16, lengths=lengths))
    case = replace(case, setup=replace(case.setup, batch_invariant=True))
    options = PagedTritonBackend.Options()
    together = case.run_from_scratch(PagedTritonBackend(options, case.setup))
    worst, start = 0.0, 0
    for request in case.requests:
        for skipped in (0, request.query_len // 2):
            alone = replace(case, requests=(replace(request, query=request.query[skipped:], num_shared=0),))
            rows = alone.run_from_scratch(PagedTritonBackend(options, case.setup))
            worst = max(worst, float((rows - together[start + skipped : start + request.query_len]).abs().max()))
        start += request.query_len
    return Check(PagedTritonBackend.__name__, dtype, dtype, "batch-invariant", worst, worst == 0.0)


def compare_sharing(dtype: str) -> Check:
    """Requests behind one prefix, whose keys are read once for several of them."""
    keys = 1024
    lengths = tuple((1 + index % 3, keys + 50 * index) for index in range(12))
    shape = CaseShape(dtype=dtype, device=DEVICE, head_size=128, block_size=16, lengths=lengths)
    case = random_case(0, shape)
    first, blocks = case.requests[0], keys // 16
    requests, next_block = [first], case.num_blocks
    for request in case.requests[1:]:
        own = len(request.block_ids) - blocks
        ids = (*first.block_ids[:blocks], *range(next_block, next_block + own))
        next_block += own
        requests.append(
            replace(
                request,
                keys=torch.cat((first.keys[:keys], request.keys[keys:])),
                values=torch.cat((first.values[:keys], request.values[keys:])),
                block_ids=ids,
                num_shared=keys,
            )
        )
    case = replace(case, requests=tuple(requests), num_blocks=next_block + 1)
    actual = case.run_from_scratch(PagedTritonBackend(PagedTritonBackend.Options(), case.setup)).float().cpu()
    worst = float((actual - on_cpu(case)).abs().max())
    return Check(PagedTritonBackend.__name__, dtype, dtype, "shared prefix", worst, worst <= TOLERANCES[dtype])


def checks(is_tail: bool) -> Iterator[Check]:
    """All rows of a part."""
    for wanted in tail_rows() if is_tail else first_rows():
        found = compare(wanted)
        if found is not None:
            yield found
    if not is_tail and not against(PagedTritonBackend, llama_8b("bfloat16", 4, 2048), PagedTritonBackend.Options()):
        yield compare_invariance("bfloat16")
        yield compare_sharing("bfloat16")
        yield from latents.checks(DEVICE)


# --- speed --------------------------------------------------------------------------------------------------


def llama_8b(kv_dtype: str, max_num_seqs: int, max_model_len: int) -> AttentionSetup:
    layer = AttentionLayer(0, 32, 8, 128, 128**-0.5)
    return AttentionSetup(
        (layer,),
        KVSpec(num_kv_heads=8, head_size=128, dtype=kv_dtype),
        16,
        "bfloat16",
        DEVICE,
        max_num_seqs,
        16384,
        max_model_len,
    )


def step_of(backend: AttentionBackend, requests: list[tuple[int, int]]) -> Callable[[], torch.Tensor]:
    """A planned step over pages in random order, as a graph where the backend can be captured."""
    setup, rng = backend.setup, np.random.default_rng(0)
    counts = [-(-(cached + new) // setup.block_size) for cached, new in requests]
    ids, ends = 1 + rng.permutation(sum(counts)), np.cumsum(counts)
    rows = [
        (ids[end - count : end].tolist(), cached, cached + new)
        for (cached, new), count, end in zip(requests, counts, ends, strict=True)
    ]
    shape = backend.kv_cache_shape(len(ids) + 1)
    cache = torch.empty(shape, dtype=getattr(torch, setup.spec.dtype), device=DEVICE)
    cache.view(torch.uint8).random_(0, 64)  # small finite numbers of every dtype
    num_tokens = sum(new for _, new in requests)
    query = torch.randn(num_tokens, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    key, value = (torch.randn(num_tokens, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    backend.plan(make_batch(rows, setup))

    def step() -> torch.Tensor:
        return backend.forward(setup.layers[0], query, key, value, cache)

    return captured(step) if backend.capabilities.graph_capture and num_tokens == len(requests) else step


def speed() -> Iterator[Speed]:
    bandwidth, flops = copy_bandwidth(), matrix_rate()
    print(f"copy {bandwidth / 1e9:.0f} GB/s, bfloat16 product {flops / 1e12:.0f} TFLOP/s", flush=True)
    for kind in (PagedTritonBackend, FlashBackend, FlashPrefillBackend):
        for reason in against(kind, llama_8b("bfloat16", 4, 2048), kind.Options()):
            print(f"{kind.__name__} is not measured: {reason}", flush=True)
        for kv_dtype in ("bfloat16", "float8_e4m3fn"):
            for batch, keys in ((1, 8192), (64, 1024), (64, 8192)):
                yield from decode(kind, kv_dtype, batch, keys, bandwidth)
        for tokens in (2048, 16384):
            yield from prefill(kind, tokens, flops)
    for tokens in (64, 16384):
        yield from writing(tokens, bandwidth)
    if not against(PagedTritonBackend, llama_8b("bfloat16", 4, 2048), PagedTritonBackend.Options()):
        yield from latents.speeds(DEVICE, bandwidth, flops)


def decode(kind: type[AttentionBackend], kv_dtype: str, batch: int, keys: int, bandwidth: float) -> Iterator[Speed]:
    setup, options = llama_8b(kv_dtype, batch, keys), kind.Options()
    if against(kind, setup, options):
        return
    took = time_us(step_of(kind(options, setup), [(keys - 1, 1)] * batch))
    rate = batch * setup.spec.page_bytes(keys) / (took * 1e-6)
    goal = GOALS["decode"] if (batch, keys) == (64, 8192) else 0.0
    yield Speed(kind.__name__, f"decode {batch} x {keys}", kv_dtype, took, rate / 1e9, "GB/s", rate / bandwidth, goal)


def prefill(kind: type[AttentionBackend], tokens: int, flops: float) -> Iterator[Speed]:
    setup, options = llama_8b("bfloat16", 4, tokens), kind.Options()
    if against(kind, setup, options):
        return
    took = time_us(step_of(kind(options, setup), [(0, tokens)]), 8)
    # Two products over the lower triangle.
    rate = 2 * 2 * 32 * 128 * tokens * (tokens + 1) / 2 / (took * 1e-6)
    yield Speed(
        kind.__name__, f"prefill {tokens}", "bfloat16", took, rate / 1e12, "TFLOP/s", rate / flops, GOALS["prefill"]
    )


def writing(tokens: int, bandwidth: float) -> Iterator[Speed]:
    """Rotating and writing pages: the operator set's launch and the one that writes, then the one that does both. Rates
    count what has to move: queries, keys and values in, queries and pages out."""
    from dovetail.attention_backends.paged_triton.launch import Launcher
    from dovetail.plugins.operators.triton.operators import TritonOperators

    setup = llama_8b("bfloat16", 1, tokens)
    if against(PagedTritonBackend, setup, PagedTritonBackend.Options()):
        return
    launcher, operators = Launcher(setup, device_facts(torch.device(DEVICE))[1]), TritonOperators(PluginOptions())
    layer, num_blocks = setup.layers[0], -(-tokens // setup.block_size)
    cache = torch.zeros(page_shape(setup, num_blocks), dtype=torch.bfloat16, device=DEVICE)
    slots = torch.zeros(tokens, 4, dtype=torch.int32, device=DEVICE)
    slots[:, 0] = torch.arange(tokens)
    heads = torch.randn(tokens, 48, 128, dtype=torch.bfloat16, device=DEVICE)
    query, key, value = torch.split(heads, [32, 8, 8], dim=1)
    cos, sin = torch.rand(tokens, 2, 1, 128, dtype=torch.bfloat16, device=DEVICE).unbind(1)

    def apart() -> None:
        operators.rotate(heads[:, :40], cos, sin)
        launcher.write(layer, query, key, value, cache, slots)

    def fused() -> None:
        launcher.write(layer, query, key, value, cache, slots, (cos, sin))

    for what, step, goal in (("rotate, then write", apart, 0.0), ("rotate and write", fused, GOALS["write"])):
        took = time_us(captured(step))
        rate = 2 * heads.numel() * heads.itemsize / (took * 1e-6)
        goal = goal if tokens > 64 else 0.0
        workload = f"{what} {tokens}"
        yield Speed(PagedTritonBackend.__name__, workload, "bfloat16", took, rate / 1e9, "GB/s", rate / bandwidth, goal)


def launch_steps_only() -> None:
    """Backends of this process launch what their steps have, not every height of tiles that an engine's could: each row
    would compile them all."""
    Passes.configs = lambda self, kind: []  # type: ignore[method-assign]


def main() -> int:
    launch_steps_only()
    parser = argparse.ArgumentParser(description="Attention backends on a GPU: correctness, then speed.")
    parser.add_argument("--tail", action="store_true", help="the rows that matter least, without speed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA GPU: nothing of this can be checked here.", file=sys.stderr)
        return 2
    failed = False
    for check in checks(arguments.tail):
        failed |= not check.passed
        verdict = "ok" if check.passed else "WRONG"
        what = f"{check.backend:20} {check.dtype:9} {check.kv_dtype:14} {check.feature:14}"
        print(f"{what} {check.worst:9.2g} {verdict}")
        print(json.dumps({"check": "attention", **asdict(check)}), flush=True)
    if not arguments.tail and not failed:
        with torch.inference_mode():
            for found in speed():
                goal = f"goal {found.goal:.0%}" if found.goal else ""
                print(
                    f"{found.backend:20} {found.workload:24} {found.kv_dtype:14} {found.time_us:10.1f} us "
                    f"{found.rate:8.1f} {found.unit:8} {found.share:5.0%} {goal}"
                )
                print(json.dumps({"speed": "attention", **asdict(found)}), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
