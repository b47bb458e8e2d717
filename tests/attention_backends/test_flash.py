"""`flash` without a GPU: plan and call arguments, fed to plain torch functions with the libraries' calling conventions;
what it says on machines that have none of them."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.attention_backends.flash import libraries
from dovetail.attention_backends.flash.backend import FlashBackend, FlashOptions
from dovetail.attention_backends.flash.libraries import FlashAttention2, FlashAttention3, FlashInfer, TorchVarlen
from dovetail.attention_backends.flash.plan import PagedLengths
from dovetail.attention_backends.flash_prefill import FlashPrefillBackend
from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import DeviceInfo, Environment
from dovetail.testing.attention_cases import CaseShape, random_case
from dovetail.testing.attention_suite import AttentionBackendSuite

H200 = Environment("cuda", 8, 2**36, devices=(DeviceInfo("H200", 2**37, (9, 0)),))


def attention_over_pages(query, keys, values, starts, used, table, scale, left, soft_cap=0.0):
    """What the libraries document, written out: a causal mask at the lower right, `left` keys before one's own."""
    output = torch.empty_like(query)
    group = query.shape[1] // keys.shape[2]
    for request, count in enumerate(used.tolist()):
        rows = slice(int(starts[request]), int(starts[request + 1]))
        pages = table[request][: -(-count // keys.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[:count].repeat_interleave(group, dim=1).double() for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        own = torch.arange(count - (rows.stop - rows.start), count)[:, None]
        seen = torch.arange(count) <= own
        if left >= 0:
            seen &= torch.arange(count) >= own - left
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(output.dtype)
    return output


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table
):
    """torch.nn.attention.varlen.varlen_attn with a block table."""
    assert cu_seq_k is None
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(seqused_k.max()))
    assert window_size[1] == 0
    return attention_over_pages(query, key, value, cu_seq_q, seqused_k, block_table, scale, window_size[0])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size, softcap,
    block_table,
):  # fmt: skip
    """That of the package flash-attn."""
    assert causal
    assert cu_seqlens_k.dtype == torch.int32
    used = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(used.max()))
    return attention_over_pages(q, k, v, cu_seqlens_q, used, block_table, softmax_scale, window_size[0], softcap)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size,
    softcap,
):  # fmt: skip
    """That of FlashAttention-3."""
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return attention_over_pages(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size[0], softcap
    )


class PagedWrapper:
    """BatchPrefillWithPagedKVCacheWrapper of FlashInfer."""

    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal
        counts = paged_kv_indptr.diff()
        self.table = [paged_kv_indices[a:b] for a, b in pairwise(paged_kv_indptr)]
        self.used = (counts - 1) * page_size + paged_kv_last_page_len
        self.starts, self.options = qo_indptr.clone(), (sm_scale, window_left, logits_soft_cap)
        self.shapes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)

    def run(self, query, pages):
        keys, values = pages
        assert self.shapes == (query.shape[1], keys.shape[2], query.shape[2], keys.shape[1])
        return attention_over_pages(query, keys, values, self.starts, self.used, self.table, *self.options)


class OnTorch(FlashBackend):
    """The backend itself over one of the functions above, on the CPU."""

    capabilities = replace(
        FlashBackend.capabilities, device_types=frozenset({"cpu"}), dtypes=frozenset({"float32", "float16"})
    )
    attention = (TorchVarlen, varlen_attn)

    @classmethod
    def check(cls, need, options, environment):
        return super(FlashBackend, cls).check(need, options, environment)

    def _create_attention(self, options, setup):
        kind, function = self.attention
        return kind(setup, function)


class OnTorchVarlen(OnTorch):
    capabilities = replace(OnTorch.capabilities, soft_cap=False)


class OnFlashAttention2(OnTorch):
    attention = (FlashAttention2, flash_attn_varlen_func)


class OnFlashAttention3(OnTorch):
    attention = (FlashAttention3, flash_attn_with_kvcache)


class OnFlashInfer(OnTorch):
    attention = (FlashInfer, PagedWrapper)


class TestTorchVarlen(AttentionBackendSuite):
    plugin = OnTorchVarlen
    num_cases = 2


class TestFlashAttention2(AttentionBackendSuite):
    plugin = OnFlashAttention2
    num_cases = 2


class TestFlashAttention3(AttentionBackendSuite):
    plugin = OnFlashAttention3
    num_cases = 2


class TestFlashInfer(AttentionBackendSuite):
    plugin = OnFlashInfer
    num_cases = 2


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch):
    """FlashInfer's buffer is for GPUs."""
    monkeypatch.setattr(libraries, "_WORKSPACE_BYTES", 1)


def test_the_call_fits_the_signature_of_this_torch():
    """What the function above takes is what torch's takes."""
    from torch.nn.attention import varlen

    theirs = inspect.signature(varlen.varlen_attn).parameters
    if "block_table" not in theirs:
        pytest.skip(f"torch {torch.__version__} takes no block table")
    ours = inspect.signature(varlen_attn).parameters
    assert [(name, p.kind) for name, p in ours.items()] == [
        (name, p.kind) for name, p in theirs.items() if name in ours
    ]


def test_lengths_of_keys_are_summed_once_a_step():
    """Every layer is handed the same tensor."""
    case = random_case(0, CaseShape())
    handed = []

    def function(q, k, v, cu_seqlens_q, cu_seqlens_k, *others, **options):
        handed.append(cu_seqlens_k)
        return q

    class Recording(OnTorch):
        attention = (FlashAttention2, function)

    backend = Recording(FlashOptions(), case.setup)
    backend.plan(case.batch())
    cache = case.make_cache(backend)
    for _ in range(2):
        backend.forward(case.layer, *case.inputs(), cache)
    first, second = handed
    assert first is second
    backend.plan(case.batch())
    backend.forward(case.layer, *case.inputs(), cache)
    assert handed[2] is not first


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_pages_that_a_window_has_freed_are_left_out(seed, has_window):
    case = random_case(seed, CaseShape(has_window=has_window, max_cached=200))
    batch, block_size = case.batch(), case.setup.block_size
    lengths = PagedLengths.of(batch, case.layer.window, block_size)
    for index, request in enumerate(case.requests):
        live = [block for block in request.block_row(block_size, case.layer.window) if block]
        count = int(lengths.seqused_k[index])
        assert lengths.block_table[index, : -(-count // block_size)].tolist() == live
        assert (request.seq_len - count) % block_size == 0
    begins, pages, last = lengths.page_lists(block_size)
    assert ((np.diff(begins) - 1) * block_size + last == lengths.seqused_k).all()
    assert 0 not in pages


# --- refusals -----------------------------------------------------------------------------------------------


def reasons(environment=H200, library="any", **changes):
    need = replace(AttentionNeed("cuda", "bfloat16", 16, frozenset({128})), **changes)
    return reasons_against(FlashBackend, need, FlashOptions(library=library), environment)


def test_a_machine_with_none_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(libraries, "_is_installed", lambda module: module == "torch")
    monkeypatch.setattr(libraries, "_takes_pages", lambda: False)
    [reason] = reasons()
    for part in ("flash_attn_interface", "pip install flashinfer-python", "pip install flash-attn", "torch 2.12"):
        assert part in reason


def test_torch_needs_large_pages(monkeypatch):
    monkeypatch.setattr(libraries, "_takes_pages", lambda: True)
    [reason] = reasons(library="torch")
    assert "multiples of 256 tokens, not 16 (set cache.block_size)" in reason
    assert reasons(library="torch", block_size=256) == []


def test_a_named_library_is_used_or_refused(monkeypatch):
    monkeypatch.setattr(libraries, "_is_installed", lambda module: module != "flash_attn")
    [reason] = reasons(library="flash_attn")
    assert reason.endswith("flash_attn: flash_attn is not installed (pip install flash-attn).")
    assert reasons() == []


def test_flash_attention_3_is_for_hopper(monkeypatch):
    """On other GPUs it is refused by name, and "any" goes on to the next."""
    monkeypatch.setattr(libraries, "_is_installed", lambda module: module in ("flash_attn_interface", "flashinfer"))
    a100 = replace(H200, devices=(*H200.devices, DeviceInfo("A100", 2**36, (8, 0))))
    assert reasons(library="flash_attn_3") == []
    [reason] = reasons(a100, library="flash_attn_3")
    assert reason.endswith("flash_attn_3: it needs compute capability 9.x, and A100 has 8.0.")
    assert reasons(a100) == []
    monkeypatch.setattr("dovetail.attention_backends.flash.backend._device_info", lambda device: a100.devices[-1])
    wrapper = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PagedWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", wrapper)
    case = random_case(0, CaseShape())
    actual = case.run_from_scratch(FlashBackend(FlashOptions(), case.setup))
    torch.testing.assert_close(actual, case.run_from_scratch(OnFlashAttention2(FlashOptions(), case.setup)))


def hybrid_reasons(environment=H200, **changes):
    need = replace(AttentionNeed("cuda", "bfloat16", 16, frozenset({128})), **changes)
    return reasons_against(FlashPrefillBackend, need, FlashOptions(), environment)


def test_prompts_through_a_library_need_both_parts(monkeypatch):
    """Trees go to the kernels, so the library need not serve them; each reason says of which part it is."""
    pytest.importorskip("triton")
    monkeypatch.setattr(libraries, "_is_installed", lambda module: module == "flash_attn_interface")
    assert hybrid_reasons(trees=True, sliding_window=True, soft_cap=True) == []
    [reason] = hybrid_reasons(sinks=True)
    assert "has no attention sinks" in reason
    a100 = replace(H200, devices=(DeviceInfo("A100", 2**36, (8, 0)),))
    [reason] = hybrid_reasons(a100)
    assert reason.startswith("prefill: FlashBackend finds no library")
    assert "flash_attn_3: it needs compute capability 9.x, and A100 has 8.0" in reason
    [reason] = hybrid_reasons(replace(H200, devices=(DeviceInfo("T4", 2**34, (7, 5)),)))
    assert reason.startswith("decode: ")
    assert FlashPrefillBackend.preference > PagedTritonBackend.preference


@pytest.mark.parametrize(
    ("environment", "changes", "reason"),
    [
        (Environment("cpu", 2, 2**33), {"device_type": "cpu"}, "runs on cuda, not on cpu."),
        (H200, {"trees": True}, "has no tree masks; choose another backend, or auto."),
        (H200, {"alibi": True}, "has no ALiBi bias; choose another backend"),
        (H200, {"kv_dtype": "int8"}, "not in int8; set cache.dtype."),
        (Environment("cuda", 8, 2**36), {}, "torch sees none"),
        (Environment("cuda", 8, 2**36, no_devices="the driver is old"), {}, "needs a CUDA GPU: the driver is old."),
    ],
)
def test_refusals_say_what_is_missing(environment, changes, reason):
    [found] = reasons(environment, **changes)
    assert reason in found
