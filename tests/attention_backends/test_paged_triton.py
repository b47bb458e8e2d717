"""`paged_triton`: its kernels in Triton's interpreter and ahead of time, its plan, its refusals. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.attention_backends.flash.libraries import Attention
from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.attention_backends.paged_triton.configs import KINDS, KernelConfig, find_config, stored_configs
from dovetail.attention_backends.paged_triton.plan import (
    RUN,
    create_items,
    create_tiles,
    max_tiles,
    split_rows,
    token_records,
    written_ends,
)
from dovetail.attention_backends.paged_triton.sharing import find_groups, share
from dovetail.contracts.attention import AttentionLayer, AttentionNeed, AttentionSetup
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.testing.attention_cases import make_batch, random_tree
from dovetail.testing.triton_aot import compile_launch

BLOCK_SIZE = 16
H200 = DeviceInfo("H200", 2**37, (9, 0))
INTERPRETED = Path(__file__).with_name("interpreted")


SMOKE = (
    "float32-plain or (put_together and 1-False-True) or (shared_keys and False-counts0) or "
    "(test_rotating_while_writing_leaves and 10-float32-int8)"
)


@pytest.mark.timeout(1500)  # all cases take minutes, the more the busier the machine
@pytest.mark.parametrize(
    ("cases", "selection"),
    [
        ("block_sparse_cases", "test_pages_outside_of_the_pattern_are_not_read"),
        ("paged_triton_cases", SMOKE),
        ("flash_prefill_cases", "torch-False"),
        pytest.param("flash_prefill_cases", "test", marks=pytest.mark.kernels),
        pytest.param("block_sparse_cases", "test", marks=pytest.mark.kernels),
        pytest.param("paged_triton_cases", "TestPagedTriton", marks=pytest.mark.kernels),
        pytest.param("paged_triton_cases", "not TestPagedTriton", marks=pytest.mark.kernels),
    ],
)
def test_kernels_in_the_interpreter(cases, selection):
    """In processes of their own: Triton decides when it is imported whether it interprets or compiles. By default each
    kernel once, all cases with `make test-kernels`."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command += ["-k", selection, str(INTERPRETED / f"{cases}.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


# --- ahead of time ------------------------------------------------------------------------------------------

LIMITS = json.loads((Path(__file__).parents[1] / "kernels" / "limits.json").read_text())
STACK_LIMIT = LIMITS["stack"]["attend"]
"""Bytes of a thread's stack, where registers are spilled to, that a default config may take."""
SHARED_LIMIT = {int(arch): size for arch, size in LIMITS["shared"].items()}
"""Bytes of shared memory that one program may have."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.kernels), 90, pytest.param(100, marks=pytest.mark.kernels)]
)
def test_default_configs_fit_and_do_not_spill(arch, kind):
    pytest.importorskip("triton")
    from dovetail.attention_backends.paged_triton.aot import Variant, attend_launch

    used = compile_launch(attend_launch(Variant(), find_config(arch, 128, 2, kind)), arch)
    assert used.stack_bytes <= STACK_LIMIT
    assert used.shared_bytes <= SHARED_LIMIT[arch]


@pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.kernels), 90, pytest.param(100, marks=pytest.mark.kernels)]
)
def test_batch_invariant_rows_do_not_spill(arch):
    """Sums of a run and of all runs are held at once."""
    pytest.importorskip("triton")
    from dovetail.attention_backends.paged_triton.aot import Variant, attend_launch

    config = find_config(arch, 128, 2, "verify")
    assert compile_launch(attend_launch(Variant(is_invariant=True), config), arch).stack_bytes == 0


@pytest.mark.kernels
@pytest.mark.parametrize(("arch", "head_size", "kind"), [(86, 128, "decode"), (120, 256, "prefill")])
def test_the_largest_configs_fit_gpus_with_less_shared_memory(arch, head_size, kind):
    pytest.importorskip("triton")
    from dovetail.attention_backends.paged_triton.aot import Variant, attend_launch

    used = compile_launch(attend_launch(Variant(head_size=head_size), find_config(arch, head_size, 2, kind)), arch)
    assert used.shared_bytes <= SHARED_LIMIT[arch]


def test_the_small_kernels_compile_without_spills():
    pytest.importorskip("triton")
    from dovetail.attention_backends.paged_triton.aot import Variant, merge_launch, write_launch

    variant = Variant(kv_dtype="int8")
    for launch in (
        write_launch(variant),
        write_launch(variant, rotary=128),
        write_launch(Variant(head_size=80), rotary=20),
        merge_launch(variant),
        merge_launch(replace(variant, features=frozenset({"sinks"}), is_invariant=True)),
    ):
        assert compile_launch(launch, 90).stack_bytes == 0


def test_every_feature_compiles():
    """With windows, caps, slopes, sinks and a pattern of blocks, over pages of fp8."""
    pytest.importorskip("triton")
    from dovetail.attention_backends.paged_triton.aot import Variant, attend_launch

    variant = Variant(kv_dtype="float8_e5m2", features=frozenset({"window", "cap", "slopes", "sinks"}), sparse=64)
    config = replace(find_config(90, 128, 1, "decode"), block_n=64)
    assert compile_launch(attend_launch(variant, config), 90).registers > 0


# --- configs ------------------------------------------------------------------------------------------------


def test_every_shape_has_a_config():
    for arch in (80, 86, 89, 90, 100, 120):
        for head_size in (16, 32, 64, 128, 256):
            for kv_bytes in (1, 2, 4):
                for kind in KINDS:
                    config = find_config(arch, head_size, kv_bytes, kind)
                    assert config.head_size >= head_size
                    assert config.arch <= arch


def test_one_entry_for_each_key():
    keys = [config.key for config in stored_configs()]
    assert len(keys) == len(set(keys))


def test_the_nearest_entry_is_found():
    configs = (
        KernelConfig(80, 128, 2, "decode", 16, 64, 4, 3),
        KernelConfig(80, 64, 2, "decode", 16, 64, 4, 3),
        KernelConfig(90, 128, 2, "decode", 16, 64, 4, 3),
    )
    assert find_config(100, 128, 2, "decode", configs) == configs[2]
    assert find_config(90, 32, 2, "decode", configs) == configs[1]
    with pytest.raises(LookupError, match="no decode config for architecture 75"):
        find_config(75, 64, 2, "decode", configs)


# --- plan ---------------------------------------------------------------------------------------------------

lengths = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 120)), min_size=1, max_size=8)


def step(requests, trees=False):
    setup = AttentionSetup(
        (AttentionLayer(0, 1, 1, 8, 1.0),),
        KVSpec(num_kv_heads=1, head_size=8, dtype="float32"),
        BLOCK_SIZE,
        "float32",
        "cpu",
        8,
        960,
        4096,
    )
    rows = [([1] * (-(-(cached + new) // BLOCK_SIZE)), cached, cached + new) for cached, new in requests]
    rng = np.random.default_rng(0)
    masks = {i: random_tree(rng, new) for i, (_, new) in enumerate(requests) if trees and 1 < new <= 40 and i % 2}
    return make_batch(rows, setup, masks)


def step_items(batch, rows, tokens_per_tile, window, most_extra, group, *, in_runs=False, shares=False):
    """The items of one launch, and the token rows of those over shared keys."""
    tiles, sharing = create_tiles(batch, rows, tokens_per_tile, window, written_ends(batch, BLOCK_SIZE)), None
    members = np.zeros(2000, dtype=np.int32)
    if shares:
        groups = find_groups(batch, rows.requests, BLOCK_SIZE, most_tokens=2000)
        tiles, sharing = share(tiles, groups, tokens_per_tile, most_extra // 2, members)
    return create_items(batch, tiles, 10, most_extra, group, sharing, in_runs=in_runs), members


def tokens_of(item, members):
    """The token rows of an item."""
    first, count = item[0], item[1]
    return members[first : first + count].tolist() if item[6] < 0 else list(range(first, first + count))


@settings(max_examples=80, deadline=None)
@given(
    lengths,
    st.sampled_from([None, 1, 30, 700]),
    st.booleans(),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 7, 64]),
    st.booleans(),
)
def test_items_cover_each_visible_key_once(requests, window, trees, tokens_per_tile, most_extra, in_runs):
    """Every row of every tile meets every key that it sees in just one item, within the bounds on their number."""
    batch = step(requests, trees)
    records = np.zeros((int(batch.query_start[-1]), 4), dtype=np.int32)
    token_records(batch, records, np.zeros(10**5, dtype=np.uint8))
    seen = np.zeros((len(records), 4096), dtype=int)
    for rows in split_rows(batch, 32):
        if rows.is_empty:
            continue
        # `step` gives all requests the same pages.
        found, members = step_items(
            batch, rows, tokens_per_tile, window, most_extra, 3, in_runs=in_runs, shares=window is None and not in_runs
        )
        assert len(found.items) <= max_tiles(rows, tokens_per_tile) + most_extra
        parts = {}
        for item in found.items.tolist():
            _, count, _, first_key, end_key, num_cached, own_first, part = item
            assert 0 < count <= tokens_per_tile
            if in_runs and part >= 0:
                assert first_key // RUN == (end_key - 1) // RUN
            for place, token in enumerate(tokens_of(item, members)):
                request = np.searchsorted(batch.query_start, token + 1) - 1
                if own_first < 0:
                    assert end_key <= requests[request][0]
                else:
                    assert own_first == batch.query_start[request]
                    assert num_cached == requests[request][0]
                seen[token, first_key:end_key] += 1
                if part >= 0:
                    parts.setdefault(token, set()).add(part + 3 * place)
        merged = {}
        for first, count, part, splits, shared, shared_splits, shared_count, offset in found.merges.tolist():
            for place in range(count):
                own = {part + 3 * (i * count + place) for i in range(splits)}
                merged[first + place] = own | {
                    shared + 3 * (i * shared_count + offset + place) for i in range(shared_splits)
                }
        assert merged == parts
        lanes = sorted(lane for of_token in parts.values() for lane in of_token)
        assert len(lanes) == len(set(lanes)), "no two parts lie at one place"
    for request, (cached, new) in enumerate(requests):
        for token in range(int(batch.query_start[request]), int(batch.query_start[request + 1])):
            own = cached + token - int(batch.query_start[request])
            position = int(records[token, 1])
            oldest = 0 if window is None else max(0, position - window + 1)
            last = cached + new - 1 if request in batch.tree_masks else own
            assert (seen[token, oldest : last + 1] == 1).all()
            assert seen[token].max() == 1


@pytest.mark.parametrize(("tokens_per_tile", "most"), [(4, 0.27), (16, 0.08), (1, 1.0)])
def test_shared_keys_are_read_once_a_tile(tokens_per_tile, most):
    """64 requests of 4001 keys whose tables are equal: the share of keys that tiles still read."""
    batch = step([(4000, 1)] * 64)
    [rows, _] = split_rows(batch, 32)

    def num_read(shares):
        found, _ = step_items(batch, rows, tokens_per_tile, None, 66, 4, shares=shares)
        return int((found.items[:, 4] - found.items[:, 3]).sum())

    assert num_read(shares=False) == 64 * 4001
    assert num_read(shares=True) <= most * num_read(shares=False)


def test_where_keys_end_is_found_once_a_step(monkeypatch):
    """For short and long rows of both kinds of layers."""
    pytest.importorskip("triton")
    found = []
    monkeypatch.setattr(
        "dovetail.attention_backends.paged_triton.passes.written_ends",
        lambda *arguments: found.append(written_ends(*arguments)) or found[-1],
    )
    layers = tuple(AttentionLayer(index, 4, 2, 16, 1.0, window=window) for index, window in enumerate((None, 64)))
    setup = AttentionSetup(
        layers, KVSpec(num_kv_heads=2, head_size=16, dtype="float32"), BLOCK_SIZE, "float32", "cpu", 4, 256, 512
    )
    backend = PagedTritonBackend(PagedTritonBackend.Options(), setup)
    backend.plan(make_batch([([1] * 4, 40, 41), ([2] * 8, 0, 100)], setup, {}))
    assert len(found) == 1


# --- launches -----------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """(kernel, grid, rows of a tile) of each launch, in place of the launch."""
    pytest.importorskip("triton")
    from dovetail.attention_backends.paged_triton import launch

    found = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **constants: found.append((self.name, grid, constants.get("BLOCK_M")))

    for name in ("attend", "merge_parts", "write_pages"):
        monkeypatch.setattr(launch, name, Recorded(name))
    return found


def forward(backend, batch):
    """One step of the backend's first layer."""
    setup, num_tokens = backend.setup, int(batch.query_start[-1])
    layer = setup.layers[0]
    shapes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    inputs = (torch.zeros(1, heads, layer.head_size).expand(num_tokens, -1, -1) for heads in shapes)
    backend.plan(batch)
    backend.forward(layer, *inputs, torch.zeros(backend.kv_cache_shape(2)))


def started(backend, launches):
    """After the first step, which launches every kernel for the compiler's sake."""
    forward(backend, make_batch([([1], 0, 1)], backend.setup))
    launches.clear()
    return backend


def small_setup(max_tokens=64, **layer):
    layer = {"num_heads": 4, "num_kv_heads": 1, "head_size": 16, "scale": 1.0, **layer}
    spec = KVSpec(num_kv_heads=1, head_size=16, dtype="float32")
    return AttentionSetup(
        (AttentionLayer(0, **layer),), spec, BLOCK_SIZE, "float32", "cpu", 4, max_tokens, max(4096, max_tokens)
    )


@pytest.mark.parametrize(
    ("window", "is_invariant", "num_merges"), [(None, False, 1), (200, False, 0), (1000, False, 1), (200, True, 1)]
)
def test_a_graph_merges_parts_only_where_keys_can_be_cut(launches, window, is_invariant, num_merges):
    """It serves steps of any lengths; a window of few keys is never cut, whatever they are, but into runs."""
    setup = replace(small_setup(window=window), batch_invariant=is_invariant)
    backend = started(PagedTritonBackend(PagedTritonBackend.Options(), setup), launches)
    batch = replace(make_batch([([1] * 2, 20, 21)], setup), is_for_graph=True)
    forward(backend, batch)
    assert [name for name, *_ in launches].count("merge_parts") == num_merges


def test_a_step_whose_keys_are_in_one_piece_merges_nothing(launches):
    """But for the first step of its kind, which compiles."""
    setup = small_setup()
    backend = PagedTritonBackend(PagedTritonBackend.Options(), setup)
    for _ in range(3):
        forward(backend, make_batch([([1] * 2, 20, 21)], setup))
    assert [name for name, *_ in launches].count("merge_parts") == 1
    forward(backend, make_batch([([1] * 200, 3000, 3001)], setup))
    assert [name for name, *_ in launches].count("merge_parts") == 2


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_graph_merges_no_rows_that_its_queries_cannot_have(launches, num_drafts):
    """A tile of 16 rows holds 4 tokens of 4 query heads, and a decode step fills one: of 256 requests, 256 * 4 rows."""
    setup = replace(small_setup(max_tokens=2048), max_num_seqs=256)
    backend = started(PagedTritonBackend(PagedTritonBackend.Options(), setup), launches)
    new = 1 + num_drafts
    batch = make_batch([([1] * 10, 100, 100 + new)] * 256, setup)
    forward(backend, replace(batch, is_for_graph=True))
    [grid] = [grid for name, grid, _ in launches if name == "merge_parts"]
    assert grid[0] == 4 * new
    assert grid[2] >= 256


@pytest.mark.parametrize("is_invariant", [False, True])
def test_the_first_step_launches_tiles_of_every_height(launches, is_invariant):
    """Steps of all lengths, alone and behind a common prefix, need none that it had not."""
    setup = replace(small_setup(max_tokens=256), batch_invariant=is_invariant)
    backend = PagedTritonBackend(PagedTritonBackend.Options(), setup)
    forward(backend, make_batch([([1] * 16, 0, 256)], setup))
    first = {(name, rows) for name, _, rows in launches}
    launches.clear()
    for new in (*range(1, 41), 200):
        forward(backend, make_batch([([1] * 16, 0, new)], setup))
    forward(backend, make_batch([([*range(1, 130), page], 2050, 2051) for page in (200, 201, 202)], setup))
    assert {(name, rows) for name, _, rows in launches} <= first


def test_a_step_of_any_size_can_be_launched(launches):
    """Dimensions of a grid but for the first end at 65535 (CUDA C programming guide); a group of 128 query heads leaves
    a tile to each token."""
    setup = small_setup(max_tokens=70_000, num_heads=128)
    backend = started(PagedTritonBackend(PagedTritonBackend.Options(), setup), launches)
    forward(backend, make_batch([([1] * 4375, 0, 70_000)], setup))
    [grid] = [grid for name, grid, _ in launches if name == "attend"]
    assert grid[0] >= 70_000
    assert all(size <= 65_535 for _, grid, _ in launches for size in grid[1:])


def test_prompts_of_a_graph_stay_with_the_kernels(launches):
    """A library plans on the host, which a replay does not do again."""
    from dovetail.attention_backends.flash.backend import FlashOptions
    from dovetail.attention_backends.flash_prefill import FlashPrefillBackend

    calls = []

    class Recorded(FlashPrefillBackend):
        def _create_attention(self, options, setup):
            class Library(Attention):
                def attend(self, layer, query, keys, values, lengths):
                    calls.append((query.shape, keys.shape, lengths.cu_seqlens_q.tolist()))
                    return query

            return Library(setup)

    setup = small_setup(max_tokens=128)
    backend = started(Recorded(FlashOptions(), setup), launches)
    batch = make_batch([([1] * 4, 10, 50), ([1] * 2, 20, 21)], setup)
    forward(backend, batch)
    assert calls == [((40, 4, 16), (2, BLOCK_SIZE, 1, 16), [0, 40])]
    assert [name for name, *_ in launches].count("attend") == 1
    calls.clear()
    forward(backend, replace(batch, is_for_graph=True))
    assert calls == []
    assert [name for name, *_ in launches].count("attend") == 3


# --- refusals -----------------------------------------------------------------------------------------------


def reasons(environment=None, **changes):
    need = replace(AttentionNeed("cuda", "bfloat16", 16, frozenset({128})), **changes)
    environment = environment or Environment("cuda", 8, 2**36, devices=(H200,))
    return reasons_against(PagedTritonBackend, need, PagedTritonBackend.Options(), environment)


def test_a_gpu_with_triton_is_taken():
    pytest.importorskip("triton")
    assert reasons() == []


@pytest.mark.parametrize(
    ("environment", "changes", "reason"),
    [
        (None, {"device_type": "cpu"}, "runs on cuda, not on cpu."),
        (None, {"dtype": "float64"}, "not float64; set model.dtype."),
        (None, {"head_sizes": frozenset({512})}, "head sizes up to 256; the model has 512."),
        (None, {"batch_invariant": True, "trees": True}, "has no batch-invariant mode for trees."),
        (Environment("cuda", 8, 2**36), {}, "torch sees none"),
        (Environment("cuda", 8, 2**36, no_devices="the driver is old"), {}, "needs a CUDA GPU: the driver is old."),
        (Environment("cuda", 8, 2**36, devices=(DeviceInfo("T4", 2**34, (7, 5)),)), {}, "T4 has 7.5."),
        (
            Environment("cuda", 8, 2**36, devices=(DeviceInfo("A100", 2**36, (8, 0)),)),
            {"kv_dtype": "float8_e4m3fn"},
            "set cache.dtype to float8_e5m2 or int8.",
        ),
    ],
)
def test_refusals_say_what_is_missing(environment, changes, reason):
    if environment is not None:
        pytest.importorskip("triton")
    found = " ".join(reasons(environment, **changes))
    assert reason in found


def test_float8_that_a_triton_cannot_widen_on_a_gpu_is_refused_for_that_version():
    pytest.importorskip("triton")
    a100 = DeviceInfo("A100", 2**36, (8, 0))

    def with_triton(version, device=a100, **changes):
        environment = Environment("cuda", 8, 2**36, devices=(device,), packages={"triton": version})
        return reasons(environment, kv_dtype="float8_e5m2", **changes)

    [reason] = with_triton("3.6.0")
    assert "install torch 2.12 or later, with its Triton, or set cache.dtype to int8" in reason
    assert with_triton("3.7.0") == with_triton("3.6.0", H200) == with_triton("3.6.0", dtype="float16") == []


def test_a_machine_without_triton_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    [reason] = reasons()
    assert "Triton is not installed: pip install --upgrade 'dovetail[triton]'" in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_here_the_reason_is_that_there_is_no_gpu():
    need = AttentionNeed("cpu", "bfloat16", 16, frozenset({128}))
    [reason] = reasons_against(PagedTritonBackend, need, PagedTritonBackend.Options(), Environment("cpu", 2, 2**33))
    assert reason == "PagedTritonBackend runs on cuda, not on cpu."
