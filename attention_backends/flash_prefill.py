"""Prompts through FlashAttention, decode and verify rows through `paged_triton`, over the pages of the latter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from dovetail.attention_backends.flash.backend import FlashBackend, FlashOptions, create_attention
from dovetail.attention_backends.flash.libraries import Attention, DeviceLengths, kind_of
from dovetail.attention_backends.flash.plan import PagedLengths
from dovetail.attention_backends.paged_triton.backend import PagedTritonBackend
from dovetail.attention_backends.paged_triton.configs import KernelConfig
from dovetail.attention_backends.paged_triton.passes import Kind, Pass, Passes, Step, TileLauncher
from dovetail.attention_backends.paged_triton.plan import Rows
from dovetail.contracts.attention import AttentionBatch, AttentionLayer, AttentionNeed, AttentionSetup
from dovetail.contracts.plugin import Environment
from dovetail.nn.host_copies import on_device


@dataclass(frozen=True)
class LibraryPass(Pass):
    """Rows that go through a FlashAttention library."""

    attention: Attention
    rows: slice | torch.Tensor
    """Token rows of the requests, which a library wants one after another."""
    lengths: DeviceLengths
    block_size: int

    def attend(self, layer: AttentionLayer, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        """One call."""
        keys, values = token_pages(kv_cache, self.block_size, layer.head_size)
        output[self.rows] = self.attention.attend(layer, query[self.rows], keys, values, self.lengths)


class LibraryPasses(Passes):
    """Passes whose long rows go through a FlashAttention library."""

    def __init__(self, setup: AttentionSetup, launcher: TileLauncher, num_processors: int, attention: Attention):
        super().__init__(setup, launcher, num_processors)
        self._attention = attention

    def plan_long(self, step: Step, rows: Rows, kind: Kind, name: str) -> Pass:
        """Lengths and tables of the long requests alone. A step for a graph stays with the kernels: the libraries plan
        on the host."""
        if step.batch.is_for_graph:
            return super().plan_long(step, rows, kind, name)
        device, block_size = torch.device(self.setup.device), self.setup.block_size
        batch, tokens = requests_alone(step.batch, rows.requests)
        lengths = DeviceLengths.of(PagedLengths.of(batch, kind.window, block_size), device)
        layers = [layer for layer in self.setup.layers if Kind.of(layer) == kind]
        for layer in {kind_of(layer): layer for layer in layers}.values():
            self._attention.plan(layer, lengths)
        is_run = int(tokens[-1]) - int(tokens[0]) + 1 == len(tokens)
        places = slice(int(tokens[0]), int(tokens[-1]) + 1) if is_run else on_device(tokens, device)
        return LibraryPass(self._attention, places, lengths, block_size)

    def configs(self, kind: Kind) -> list[KernelConfig]:
        """Without the tiles of prompts, which only graphs have here, and these compile what they need."""
        return [config for config in super().configs(kind) if config.kind != "prefill"]


class FlashPrefillBackend(PagedTritonBackend):
    """Requests with more than 32 query tokens go through the library that `library` names (see `flash`): there a kernel
    written for one kind of GPU gains most. All others, and steps that are captured, go through the kernels of
    `paged_triton`. These write the pages for both: a library reads them in place, as a view with other strides.
    """

    preference: ClassVar[int] = 12
    Options = FlashOptions
    options: FlashOptions
    capabilities = replace(
        PagedTritonBackend.capabilities,
        dtypes=FlashBackend.capabilities.dtypes,
        kv_dtypes=None,
        alibi=False,
        sinks=False,
        batch_invariant=False,
        latents=False,
    )

    @classmethod
    def check(cls, need: AttentionNeed, options: Any, environment: Environment) -> list[str]:
        """What either part has against the need."""
        decode = [f"decode: {reason}" for reason in PagedTritonBackend.check(need, options, environment)]
        # The libraries get no row of a tree.
        return decode + [
            f"prefill: {reason}"
            for reason in FlashBackend.check(replace(need, trees=False), options, environment)
            if not decode
        ]

    def create_passes(self, launcher: TileLauncher, num_processors: int) -> Passes:
        """Those that leave prompts to the library."""
        attention = self._create_attention(self.options, self.setup)
        return LibraryPasses(self.setup, launcher, num_processors, attention)

    def _create_attention(self, options: FlashOptions, setup: AttentionSetup) -> Attention:
        return create_attention(options, setup)


def token_pages(kv_cache: torch.Tensor, block_size: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of pages of `paged_triton` as [pages, block_size, num_kv_heads, head_size], not copied."""
    pages, num_kv_heads = kv_cache.shape[:2]
    by_token = kv_cache.view(pages, num_kv_heads, 2, block_size, head_size).permute(2, 0, 3, 1, 4)
    return by_token[0], by_token[1]


def requests_alone(batch: AttentionBatch, requests: np.ndarray) -> tuple[AttentionBatch, np.ndarray]:
    """Some requests of a batch as one of their own, and their token rows, int64."""
    starts, ends = batch.query_start[requests], batch.query_start[requests + 1]
    counts = ends - starts
    query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = np.repeat(starts - query_start[:-1], counts) + np.arange(int(query_start[-1]))
    alone = AttentionBatch(
        query_start=query_start,
        seq_lens=batch.seq_lens[requests],
        block_table=batch.block_table[requests],
        slot_mapping=batch.slot_mapping[tokens],
        max_query_len=int(counts.max()),
        max_seq_len=int(batch.seq_lens[requests].max()),
    )
    return alone, tokens.astype(np.int64)
