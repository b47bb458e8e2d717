"""The rows of the attention part for latent vectors: `triton_mla` against `reference`, then against the roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from measured import TOLERANCES, Check, Speed, captured, time_us

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.attention_backends.triton_mla.backend import TritonMLABackend
from dovetail.contracts.attention import AttentionLayer, AttentionSetup
from dovetail.contracts.kv import LatentSpec
from dovetail.testing.attention_cases import AttentionCase, CaseShape, make_batch, random_case
from dovetail.testing.latent_cases import LatentCase

NAME = TritonMLABackend.__name__
LATENT, ROTARY = 512, 64
HEADS = (16, 128)
"""Of a rank of eight, and of one GPU: tiles of 16 rows and of more."""
GOAL = 0.80
"""Share of the measured copy bandwidth for 16 heads."""
LENGTHS = {
    "decode": ((1, 600), (1, 30)),
    "mixed": ((1, 300), (5, 200), (90, 40)),
}
"""(new, cached) tokens of each request."""


def create(setup: AttentionSetup) -> TritonMLABackend:
    return TritonMLABackend(TritonMLABackend.Options(), setup)


class AbsorbedCase(LatentCase):
    """A case whose queries are absorbed already: at these sizes that would take longer than the rest."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and the new latent vectors."""
        return AttentionCase.inputs(self)


def random_step(device: str, num_heads: int, lengths: tuple[tuple[int, int], ...]) -> AbsorbedCase:
    """A step of DeepSeek's sizes in bfloat16."""
    shape = CaseShape(dtype="bfloat16", device=device, block_size=16, lengths=lengths)
    head_size = LATENT + ROTARY
    case = random_case(0, replace(shape, head_size=head_size, num_kv_heads=1))
    rng = torch.Generator().manual_seed(0)
    requests = tuple(
        replace(
            request,
            query=torch.randn(request.query_len, num_heads, head_size, generator=rng).to(torch.bfloat16),
        )
        for request in case.requests
    )
    spec = LatentSpec(latent_size=LATENT, rotary_size=ROTARY, dtype="bfloat16")
    setup = replace(case.setup, spec=spec, layers=(replace(case.layer, num_heads=num_heads),))
    nothing = np.zeros((num_heads, 0, 0))
    return AbsorbedCase(setup, case.num_blocks, requests, key_up=nothing, value_up=nothing)


def compare(device: str, what: str, num_heads: int) -> Check:
    """One step against `reference` on the CPU."""
    case = random_step(device, num_heads, LENGTHS[what])
    actual = case.run_from_scratch(create(case.setup)).float().cpu()
    on_cpu = replace(case, setup=replace(case.setup, device="cpu"))
    expected = on_cpu.run_from_scratch(ReferenceBackend(ReferenceBackend.Options(), on_cpu.setup)).float()
    worst = float((actual - expected).abs().max())
    feature = f"latents, {what}, {num_heads} heads"
    return Check(NAME, "bfloat16", "bfloat16", feature, worst, worst <= TOLERANCES["bfloat16"])


def compare_invariance(device: str) -> Check:
    """Rows of a request alone against the same rows with others: the same bits."""
    case = random_step(device, 16, ((1, 1100), (40, 700), (5, 20)))
    case = replace(case, setup=replace(case.setup, batch_invariant=True))
    together = case.run_from_scratch(create(case.setup))
    worst, start = 0.0, 0
    for request in case.requests:
        alone = replace(case, requests=(replace(request, num_shared=0),))
        rows = alone.run_from_scratch(create(case.setup))
        worst = max(worst, float((rows - together[start : start + request.query_len]).abs().max()))
        start += request.query_len
    return Check(NAME, "bfloat16", "bfloat16", "latents, batch-invariant", worst, worst == 0.0)


def checks(device: str) -> Iterator[Check]:
    for num_heads in HEADS:
        for what in LENGTHS:
            yield compare(device, what, num_heads)
    yield compare_invariance(device)


def deepseek(device: str, num_heads: int, max_num_seqs: int, max_model_len: int) -> AttentionSetup:
    """One layer of DeepSeek-V3."""
    layer = AttentionLayer(0, num_heads, 1, LATENT + ROTARY, 192**-0.5)
    spec = LatentSpec(latent_size=LATENT, rotary_size=ROTARY, dtype="bfloat16")
    return AttentionSetup((layer,), spec, 16, "bfloat16", device, max_num_seqs, 16384, max_model_len)


def step_of(setup: AttentionSetup, requests: list[tuple[int, int]]) -> Callable[[], torch.Tensor]:
    """A planned step of (cached, new) tokens over pages in random order."""
    backend, rng = create(setup), np.random.default_rng(0)
    counts = [-(-(cached + new) // setup.block_size) for cached, new in requests]
    ids, ends = 1 + rng.permutation(sum(counts)), np.cumsum(counts)
    rows = [
        (ids[end - count : end].tolist(), cached, cached + new)
        for (cached, new), count, end in zip(requests, counts, ends, strict=True)
    ]
    cache = torch.zeros(backend.kv_cache_shape(len(ids) + 1), dtype=torch.bfloat16, device=setup.device)
    num_tokens, [layer] = sum(new for _, new in requests), setup.layers
    query = torch.randn(num_tokens, layer.num_heads, layer.head_size, device=setup.device).to(torch.bfloat16)
    latent = torch.randn(num_tokens, layer.head_size, device=setup.device).to(torch.bfloat16)
    backend.plan(make_batch(rows, setup))
    return lambda: backend.latent_forward(layer, query, latent, cache)


def speeds(device: str, bandwidth: float, flops: float) -> Iterator[Speed]:
    """Decode in bytes of the pages, a prompt in products of the absorbed form."""
    for num_heads in HEADS:
        for batch, keys in ((1, 8192), (64, 8192)):
            setup = deepseek(device, num_heads, batch, keys)
            took = time_us(captured(step_of(setup, [(keys - 1, 1)] * batch)))
            rate = batch * setup.spec.page_bytes(keys) / (took * 1e-6)
            goal = GOAL if (num_heads, batch) == (16, 64) else 0.0
            what = f"latents {num_heads} h, {batch} x {keys}"
            yield Speed(NAME, what, "bfloat16", took, rate / 1e9, "GB/s", rate / bandwidth, goal)
        tokens = 2048
        took = time_us(step_of(deepseek(device, num_heads, 4, tokens), [(0, tokens)]), 8)
        # Two products over the lower triangle.
        rate = 2 * num_heads * (2 * LATENT + ROTARY) * tokens * (tokens + 1) / 2 / (took * 1e-6)
        what = f"latents {num_heads} h, prefill {tokens}"
        yield Speed(NAME, what, "bfloat16", took, rate / 1e12, "TFLOP/s", rate / flops, 0.0)
