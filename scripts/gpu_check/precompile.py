"""Compiles the kernels of the other parts into Triton's cache, on all cores and without a GPU, so that the parts only
measure.

    python scripts/gpu_check/precompile.py                 # for the GPU that is here
    python scripts/gpu_check/precompile.py --arch 90       # for another, into TRITON_CACHE_DIR, which can be carried

A GPU's machine finds them if its Triton is of the same version. Prints what was compiled and how long that took.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import attention
import latents
import quantization
import torch
from carried import settle

from dovetail.attention_backends.block_sparse.backend import BlockSparseBackend, RotatingBlockSparse
from dovetail.attention_backends.paged_triton import machine
from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.attention_backends.paged_triton.passes import MAX_SHORT
from dovetail.plugins.operators.triton.operators import TritonOperators
from dovetail.plugins.quantization import int8_kernel
from dovetail.plugins.quantization.int4.method import _Packed
from dovetail.plugins.quantization.w8a8.fused import few_rows_products, quantize_rows, scale_products, suits_few
from dovetail.testing.attention_cases import make_batch
from dovetail.testing.kernel_compiles import compiled_launches

MULTIPROCESSORS = 132
"""Of an H100. How many there are decides the size of grids, which kernels do not depend on."""

Job = Callable[[], object]


def jobs() -> list[tuple[str, Job]]:
    """In the order in which the parts want them; each is a process's work."""
    return [*operator_jobs(), *speed_jobs(), *attention_jobs(), *quantization_jobs()]


def attention_jobs() -> Iterator[tuple[str, Job]]:
    """Of each row, and of those that compare the kernels with themselves."""
    yield "batch-invariant bfloat16", lambda: attention.compare_invariance("bfloat16")
    yield "shared prefix bfloat16", lambda: attention.compare_sharing("bfloat16")
    yield "latents batch-invariant", lambda: latents.compare_invariance(attention.DEVICE)
    for num_heads in latents.HEADS:
        yield f"latents {num_heads} heads", lambda heads=num_heads: launch_latents(heads)  # type: ignore[misc]
    for wanted in (*attention.first_rows(), *attention.tail_rows()):
        if wanted.backend in (PagedTritonBackend, BlockSparseBackend):
            pages = "rotation" if wanted.rotations else wanted.feature
            name = f"{wanted.backend.__name__} {wanted.dtype} {wanted.kv_dtype} {pages}"
            for one in each_shape(wanted):
                yield name, lambda one=one: launch_wanted(one)  # type: ignore[misc]


def launch_latents(num_heads: int) -> None:
    """Every launch of the rows of `num_heads`, without their results."""
    for lengths in latents.LENGTHS.values():
        case = latents.random_step(attention.DEVICE, num_heads, lengths)
        case.run_from_scratch(latents.create(case.setup))
    setup = latents.deepseek(attention.DEVICE, num_heads, 4, 4096)
    for requests in ([(2047, 1)] * 2, [(0, 2048)]):
        latents.step_of(setup, requests)()


def each_shape(wanted: attention.Wanted) -> Iterator[attention.Wanted]:
    """Jobs of about the same length."""
    for shape in wanted.shapes:
        yield replace(wanted, shapes=(shape,))
    for rotation in wanted.rotations:
        yield replace(wanted, rotations=(rotation,))


def launch_wanted(wanted: attention.Wanted) -> None:
    """Every launch of a row, without its results."""
    kind = RotatingBlockSparse if wanted.backend is BlockSparseBackend else wanted.backend
    for place, case in enumerate(wanted.cases()):
        made = kind(wanted.options, case.setup)
        if wanted.rotations:
            attention.rotation_error(case, made, wanted.rotations[place][1])
        else:
            case.run_from_scratch(made)


def speed_jobs() -> Iterator[tuple[str, Job]]:
    """Decoding, verifying and prefilling of an 8B model, also as the engine launches it."""
    for kv_dtype in ("bfloat16", "float8_e4m3fn"):
        for what, requests in (
            ("decode", [(2047, 1)] * 2),
            *((f"verify {tokens}", [(2047, tokens)] * 2) for tokens in (2, 5, MAX_SHORT)),
            ("prefill", [(0, 2048)]),
        ):
            yield f"{what} {kv_dtype}", lambda kv=kv_dtype, rows=requests: launch_step(kv, rows)  # type: ignore[misc]


def launch_step(kv_dtype: str, requests: list[tuple[int, int]]) -> None:
    setup = attention.llama_8b(kv_dtype, 4, 4096)
    made = PagedTritonBackend(PagedTritonBackend.Options(), setup)
    num_pages = 1 + sum(-(-(cached + new) // setup.block_size) for cached, new in requests)
    cache = torch.zeros(made.kv_cache_shape(num_pages), dtype=getattr(torch, kv_dtype))
    num_tokens = sum(new for _, new in requests)
    heads = torch.zeros(num_tokens, 48, 128, dtype=torch.bfloat16)
    query, key, value = torch.split(heads, [32, 8, 8], dim=1)
    cos, sin = torch.zeros(num_tokens, 2, 1, 128, dtype=torch.bfloat16).unbind(1)
    rows = [([0] * -(-(cached + new) // setup.block_size), cached, cached + new) for cached, new in requests]
    made.plan(make_batch(rows, setup))
    for inputs in ((query, key, value), tuple(part.contiguous() for part in (query, key, value))):
        made.forward(setup.layers[0], *inputs, cache)
        made.rotate_and_forward(setup.layers[0], *inputs, cos, sin, cache)


def quantization_jobs() -> Iterator[tuple[str, Job]]:
    """Each method's kernels, in the sizes of the part `quantization`."""
    dtype, out_features, in_features = torch.bfloat16, 4096, 14336
    for rows in quantization.ROWS:
        x = torch.zeros(rows, in_features, dtype=dtype)
        yield (
            f"int8 {rows}",
            lambda x=x: int8_kernel.multiplied(  # type: ignore[misc]
                x, torch.zeros(out_features, in_features, dtype=torch.int8), torch.ones(out_features)
            ),
        )
        yield f"int4 {rows}", lambda x=x: four_bits(out_features, in_features).multiplied(x)  # type: ignore[misc]
    yield "w8a8 and fp8", lambda: launch_eight_bits(dtype, out_features, in_features)


def four_bits(out_features: int, in_features: int) -> _Packed:
    groups = in_features // quantization.GROUP
    scales, zeros = torch.zeros(2, groups, out_features, dtype=torch.float16)
    nibbles = torch.zeros(out_features, in_features // 2, dtype=torch.uint8)
    return _Packed(nibbles, scales, zeros, quantization.GROUP)


def launch_eight_bits(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    column_scales, bias = torch.ones(out_features), torch.zeros(out_features, dtype=dtype)
    for rows in quantization.ROWS:
        x = torch.zeros(rows, in_features, dtype=dtype)
        for rounded_to, most in ((torch.float8_e4m3fn, 448.0), (torch.int8, 127.0)):
            values, row_scales = quantize_rows(x, rounded_to, most, 1e-30)
            if suits_few(x):
                products = few_rows_products(values, torch.zeros(out_features, in_features, dtype=rounded_to))
            elif rounded_to == torch.int8:
                products = torch.zeros(1, rows, out_features, dtype=torch.int32)
            else:
                continue
            for added in (None, bias):
                scale_products(products, row_scales, column_scales, added, dtype)


def operator_jobs() -> Iterator[tuple[str, Job]]:
    """The set's operators in the sizes of an 8B model."""
    operators = TritonOperators(TritonOperators.Options())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield f"rows {dtype}", lambda dtype=dtype: launch_rows(operators, dtype)  # type: ignore[misc]
        yield f"draw {dtype}", lambda dtype=dtype: launch_draw(operators, dtype)  # type: ignore[misc]


def launch_rows(operators: TritonOperators, dtype: torch.dtype) -> None:
    for rows in (1, 129, 4096):
        x, weight = torch.zeros(rows, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
        operators.rms_norm(x, weight, 1e-5)
        operators.add_rms_norm(x, x.clone(), weight, 1e-5)
        operators.silu_mul(torch.zeros(rows, 8192, dtype=dtype))
        cos, sin = torch.zeros(rows, 2, 1, 128, dtype=dtype).unbind(1)
        operators.rotate(torch.zeros(rows, 40, 128, dtype=dtype), cos, sin)


def launch_draw(operators: TritonOperators, dtype: torch.dtype) -> None:
    ones = torch.ones(8)
    operators.draw(
        torch.zeros(8, 128256, dtype=dtype), ones, ones, torch.full((8,), 50), ones.double(), torch.zeros(8).double()
    )


def fill(index: int, arch: int) -> tuple[str, int, int, float]:
    """One job: its name, kernels compiled and found, and seconds of a core, its compilers' among them."""
    torch.set_num_threads(1)
    attention.DEVICE = "cpu"
    attention.launch_steps_only()
    machine.device_facts = lambda device: (MULTIPROCESSORS, arch)
    name, job = jobs()[index]
    before = os.times()
    with compiled_launches(arch, execute=False) as launches:
        job()
    spent = sum(os.times()[:4]) - sum(before[:4])
    return name, launches.compiled, launches.found, spent


def here() -> int:
    """The compute capability of the GPU that is here."""
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def main() -> int:
    parser = argparse.ArgumentParser(description="Fills Triton's cache with the kernels of the GPU check.")
    parser.add_argument("--arch", type=int, help="compute capability, as 80, 90 or 100; default: of the GPU here")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; default: all cores")
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    parser.add_argument("--null", action="store_true", help="the dry run, which has no kernels")
    arguments = parser.parse_args()
    if arguments.null:
        return 0
    if arguments.arch is None and not torch.cuda.is_available():
        print("No CUDA GPU here: say for which one with --arch.", file=sys.stderr)
        return 2
    if "TRITON_CACHE_DIR" in os.environ:
        settle(Path(os.environ["TRITON_CACHE_DIR"]).absolute())
    arch = arguments.arch or here()
    chosen = [index for index, (name, _) in enumerate(jobs()) if arguments.only in name]
    started = time.perf_counter()
    compiled = found = failed = 0
    busy = longest = 0.0
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(fill, index, arch) for index in chosen]):
            if done.exception() is not None:
                failed = 1
                print(json.dumps({"precompile": "failed", "why": repr(done.exception())}), flush=True)
                continue
            name, new, known, seconds = done.result()
            compiled, found, busy = compiled + new, found + known, busy + seconds
            longest = max(longest, seconds)
            row = {"precompile": name, "compiled": new, "found": known, "seconds": round(seconds, 2)}
            print(json.dumps(row), flush=True)
    took = time.perf_counter() - started
    print(
        f"sm_{arch}: {compiled} kernels compiled and {found} found in {took:.0f} s by {arguments.jobs} processes: "
        f"{busy:.0f} s of a core, so at the least {max(busy / 16, longest):.0f} s on 16 cores (an estimate)"
    )
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
