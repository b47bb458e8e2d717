"""`triton_mla`: its kernels in Triton's interpreter and ahead of time, its launches, its refusals. No GPU is needed."""

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

from dovetail.attention_backends.paged_triton import machine
from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.attention_backends.triton_mla.backend import TritonMLABackend
from dovetail.contracts.attention import AttentionLayer, AttentionNeed, AttentionSetup
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kv import KVSpec, LatentSpec
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.testing.attention_cases import make_batch
from dovetail.testing.triton_aot import compile_launch

pytest.importorskip("triton")

from triton import knobs

from dovetail.attention_backends.triton_mla import aot
from dovetail.testing.kernel_compiles import compiled_launches

CASES = Path(__file__).with_name("interpreted") / "triton_mla_cases.py"
LIMITS = json.loads((Path(__file__).parents[1] / "kernels" / "limits.json").read_text())
SMOKE = "cut_and_put_together or known_models or bits_stay or fill_up or shared_keys or (test_heads and 40)"
ARCHES = pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.kernels), 90, pytest.param(100, marks=pytest.mark.kernels)]
)


@pytest.mark.parametrize("selection", [SMOKE, pytest.param("test", marks=pytest.mark.kernels)])
def test_kernels_in_the_interpreter(selection):
    """In a process of its own: Triton decides when it is imported whether it interprets or compiles."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection, str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


# --- ahead of time ------------------------------------------------------------------------------------------


@ARCHES
@pytest.mark.parametrize("num_heads", [16, 128])
def test_decode_fits_and_does_not_spill(arch, num_heads):
    """At 512 + 64 elements, with the 16 heads that a rank of eight has and with all 128."""
    used = compile_launch(aot.attend_launch(aot.LatentVariant(arch, num_heads), "decode"), arch)
    assert used.stack_bytes == 0
    assert used.shared_bytes <= LIMITS["shared"][str(arch)]


@pytest.mark.kernels
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_all_rows_fit_and_do_not_spill(arch, dtype):
    """Verify rows with trees, prompts, and rows whose bits must not depend on others, which hold two sums. float32,
    which has no matrix units, may take as much stack as other attention."""
    most = LIMITS["stack"]["attend"] if dtype == "float32" else 0
    variant = aot.LatentVariant(arch, dtype=dtype)
    invariant = replace(variant, is_invariant=True)
    launches = [aot.attend_launch(variant, rows) for rows in ("verify", "prefill")]
    for launch in (*launches, aot.attend_launch(invariant, "verify"), aot.merge_launch(invariant)):
        used = compile_launch(launch, arch)
        assert used.stack_bytes <= most, launch.name
        assert used.shared_bytes <= LIMITS["shared"][str(arch)], launch.name


@pytest.mark.kernels
@pytest.mark.parametrize("arch", [86, 120])
@pytest.mark.parametrize(("num_heads", "rows"), [(16, "decode"), (128, "verify")])
def test_gpus_with_less_shared_memory_are_served(arch, num_heads, rows):
    used = compile_launch(aot.attend_launch(aot.LatentVariant(arch, num_heads), rows), arch)
    assert used.shared_bytes <= LIMITS["shared"][str(arch)]


def test_the_small_kernels_compile_without_spills():
    variant = aot.LatentVariant(90)
    for launch in (aot.write_launch(variant), aot.merge_launch(variant)):
        assert compile_launch(launch, 90).stack_bytes == 0


# --- tiles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("num_heads", [1, 16, 24, 40, 64, 96, 128])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_every_head_is_in_one_tile(arch, num_heads, is_invariant):
    """As many heads as possible in each, none left over, and rows enough for a token's."""
    variant = aot.LatentVariant(arch, num_heads, is_invariant=is_invariant)
    launcher, layer = variant.launcher(), variant.layer
    kind = launcher.kind(layer)
    assert kind.group * kind.num_groups == num_heads
    for rows in aot.ROWS:
        assert launcher.config(rows, 5 * kind.group, kind.group).block_m >= kind.group
    if num_heads == 128:
        assert kind.group == launcher.config("prefill", 0, kind.group).block_m


# --- launches -----------------------------------------------------------------------------------------------


def small_setup(**changes):
    layer = AttentionLayer(0, 16, 1, 24, 1.0)
    spec = LatentSpec(latent_size=16, rotary_size=8, dtype="bfloat16")
    return replace(AttentionSetup((layer,), spec, 16, "bfloat16", "cpu", 4, 512, 4096), **changes)


def step(backend, rows, is_for_graph=False):
    setup = backend.setup
    batch = replace(make_batch(rows, setup), is_for_graph=is_for_graph)
    num_tokens = int(batch.query_start[-1])
    dtype = getattr(torch, setup.dtype)
    backend.plan(batch)
    query = torch.zeros(num_tokens, setup.layers[0].num_heads, setup.spec.head_size, dtype=dtype)
    latent = torch.zeros(num_tokens, setup.spec.head_size, dtype=dtype)
    return backend.latent_forward(setup.layers[0], query, latent, torch.zeros(backend.kv_cache_shape(2), dtype=dtype))


@pytest.mark.parametrize("is_invariant", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_first_step_compiles_what_later_ones_need(tmp_path, monkeypatch, is_invariant):
    """Decode, verify and prefill rows, long and short, merged and not, compiled for sm_90 as they would be there."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(machine, "device_facts", lambda device: (4, 90))
    backend = TritonMLABackend(TritonMLABackend.Options(), small_setup(batch_invariant=is_invariant))
    with compiled_launches(90, execute=False) as launches:
        step(backend, [([1], 0, 3)])
        first = launches.kernels
        for new in (1, 2, 5, 33):
            step(backend, [([1] * 4, 20, 20 + new), ([1] * 200, 3000, 3000 + new)])
        step(backend, [([1] * 4, 20, 21)] * 4, is_for_graph=True)
        step(backend, [([*range(1, 130), page], 2050, 2051) for page in (200, 201, 202, 203)])
    assert launches.kernels == first


@pytest.fixture
def grids(monkeypatch):
    """(kernel, grid) of each launch, in place of the launch."""
    from dovetail.attention_backends.triton_mla import launch

    found = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **constants: found.append((self.name, grid))

    for name in ("attend_latents", "merge_parts", "write_latents"):
        monkeypatch.setattr(launch, name, Recorded(name))
    return found


def test_a_graph_launches_the_same_whatever_the_lengths(grids):
    """And a step that is not captured merges only where keys were cut."""
    backend = TritonMLABackend(TritonMLABackend.Options(), small_setup())
    step(backend, [([1], 0, 1)])  # compiles
    launched = []
    for keys in (5, 700, 4000):
        grids.clear()
        step(backend, [([1] * 256, keys, keys + 1)] * 3, is_for_graph=True)
        launched.append(list(grids))
    assert launched[0] == launched[1] == launched[2]
    grids.clear()
    step(backend, [([1] * 256, 200, 201)])
    assert [name for name, _ in grids] == ["write_latents", "attend_latents"]
    step(backend, [([1] * 256, 3000, 3001)])
    assert [name for name, _ in grids[2:]] == ["write_latents", "attend_latents", "merge_parts"]


def test_slots_are_copied_after_all_were_read():
    backend = TritonMLABackend(TritonMLABackend.Options(), small_setup())
    cache = torch.arange(2 * 16 * 24, dtype=torch.bfloat16).view(backend.kv_cache_shape(2)).clone()
    before = cache.view(32, 24).clone()
    slots = torch.tensor([3, 17, 20])
    backend.move_slots(cache, slots, slots.roll(-1))
    assert torch.equal(cache.view(32, 24)[slots.roll(-1)], before[slots])
    others = np.setdiff1d(np.arange(32), slots)
    assert torch.equal(cache.view(32, 24)[others], before[others])


# --- refusals -----------------------------------------------------------------------------------------------

H200 = Environment("cuda", 8, 2**36, devices=(DeviceInfo("H200", 2**37, (9, 0)),))


def reasons(plugin=TritonMLABackend, environment=H200, **changes):
    need = replace(AttentionNeed("cuda", "bfloat16", 16, frozenset({576}), latents=True), **changes)
    return reasons_against(plugin, need, plugin.Options(), environment)


def test_latents_are_taken_and_left_to_this_backend():
    assert reasons() == reasons(trees=True) == reasons(batch_invariant=True) == []
    [reason] = reasons(PagedTritonBackend, head_sizes=frozenset({24}))
    assert "no multi-head latent attention" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latents": False}, "serves multi-head latent attention only; choose paged_triton, or auto."),
        ({"head_sizes": frozenset({1088})}, "serves up to 512 + 64 elements a vector; these have 1088."),
        ({"kv_dtype": "int8"}, "set cache.dtype"),
        ({"kv_dtype": "float8_e4m3fn"}, "set cache.dtype"),
        ({"batch_invariant": True, "trees": True}, "no batch-invariant mode for trees"),
        ({"sliding_window": True}, "has no sliding window"),
        ({"sinks": True}, "has no attention sinks"),
        ({"environment": Environment("cuda", 8, 2**36)}, "torch sees none"),
    ],
)
def test_refusals_say_what_is_missing(changes, reason):
    assert reason in " ".join(reasons(**changes))


@pytest.mark.parametrize(
    ("spec", "num_heads", "reason"),
    [
        (KVSpec(num_kv_heads=1, head_size=24, dtype="bfloat16"), 16, "set attention to paged_triton, or auto"),
        (LatentSpec(latent_size=560, rotary_size=16, dtype="bfloat16"), 16, "these have 560 [+] 16"),
        (LatentSpec(latent_size=16, rotary_size=8, dtype="float32"), 16, "not in float32; set cache.dtype"),
        (LatentSpec(latent_size=16, rotary_size=8, dtype="bfloat16"), 160, "up to 128 query heads; the model has 160"),
    ],
)
def test_what_check_cannot_see_is_refused_at_the_start(spec, num_heads, reason):
    setup = small_setup(spec=spec)
    layers = (replace(setup.layers[0], num_heads=num_heads),)
    with pytest.raises(ConfigError, match=reason):
        TritonMLABackend(TritonMLABackend.Options(), replace(setup, layers=layers))


def test_keys_and_values_are_refused():
    backend = TritonMLABackend(TritonMLABackend.Options(), small_setup())
    nothing = torch.zeros(0)
    with pytest.raises(PluginError, match="call latent_forward, or choose paged_triton"):
        backend.forward(backend.setup.layers[0], nothing, nothing, nothing, nothing)
