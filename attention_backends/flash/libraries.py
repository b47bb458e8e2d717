"""The libraries that `flash` can call: what each needs, and how it is called.

Their arguments follow their documentation; which of them runs depends on what is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dovetail.attention_backends.flash.plan import PagedLengths
from dovetail.contracts.attention import AttentionLayer, AttentionNeed, AttentionSetup
from dovetail.contracts.plugin import DeviceInfo

_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends."""


@dataclass(frozen=True)
class DeviceLengths:
    """`PagedLengths` on the device."""

    host: PagedLengths
    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor

    @functools.cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """int32 [R + 1]: computed for the library that asks, by the first layer of a step."""
        return torch.nn.functional.pad(self.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))

    @classmethod
    def of(cls, lengths: PagedLengths, device: torch.device) -> DeviceLengths:
        return cls(
            lengths,
            to_device(lengths.cu_seqlens_q, device),
            to_device(lengths.seqused_k, device),
            to_device(lengths.block_table, device),
        )


@dataclass(frozen=True)
class Library:
    """One way to compute attention over pages."""

    name: str
    module: str
    install: str
    """What to do where the module is missing."""
    page_multiple: int
    """Block sizes that its paged kernels take are multiples of this."""
    soft_cap: bool
    create: Callable[[AttentionSetup], Attention]
    only_major: int | None = None
    """Major compute capability of the only GPUs that it has kernels for; None: any that `flash` serves."""

    def against(self, need: AttentionNeed, devices: Sequence[DeviceInfo]) -> list[str]:
        """Why it cannot serve `need` on `devices`; empty if it can."""
        if not _is_installed(self.module):
            return [f"{self.name}: {self.module} is not installed ({self.install})"]
        if self.name == "torch" and not _takes_pages():
            return [f"torch: varlen_attn of torch {torch.__version__} takes no block table ({self.install})"]
        reasons = []
        other = next((device for device in devices if device.compute_capability[0] != self.only_major), None)
        if self.only_major is not None and other is not None:
            major, minor = other.compute_capability
            reasons.append(
                f"{self.name}: it needs compute capability {self.only_major}.x, and {other.name} has {major}.{minor}"
            )
        if need.block_size % self.page_multiple:
            reasons.append(
                f"{self.name}: its pages are multiples of {self.page_multiple} tokens, not {need.block_size} (set "
                f"cache.block_size)"
            )
        if need.soft_cap and not self.soft_cap:
            reasons.append(f"{self.name}: it has no soft cap of the scores")
        return reasons


class Attention(ABC):
    """A library at work for one setup: `plan` once a step and window, `attend` once a layer."""

    def __init__(self, setup: AttentionSetup):
        self._setup = setup

    def plan(self, layer: AttentionLayer, lengths: DeviceLengths) -> None:
        """Called once a step for one layer of each kind, with the lengths of its window."""
        return

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: DeviceLengths,
    ) -> torch.Tensor:
        """query [T, num_heads, head_size]; keys and values [pages, block_size, num_kv_heads, head_size]."""


class TorchVarlen(Attention):
    """`torch.nn.attention.varlen.varlen_attn` with a block table, from torch 2.12 on."""

    def __init__(self, setup: AttentionSetup, function: Callable[..., Any] | None = None):
        super().__init__(setup)
        self._function = function or importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: DeviceLengths,
    ) -> torch.Tensor:
        output: torch.Tensor = self._function(
            query,
            keys,
            values,
            lengths.cu_seqlens_q,
            None,
            lengths.host.max_query_len,
            lengths.host.max_seqused,
            scale=layer.scale,
            window_size=window_of(layer),
            enable_gqa=layer.num_heads != layer.num_kv_heads,
            seqused_k=lengths.seqused_k,
            block_table=lengths.block_table,
        )
        return output


class FlashAttention2(Attention):
    """`flash_attn_varlen_func` of the package flash-attn. It wants cumulative key lengths, whose differences count."""

    def __init__(self, setup: AttentionSetup, function: Callable[..., Any] | None = None):
        super().__init__(setup)
        self._function = function or importlib.import_module("flash_attn").flash_attn_varlen_func

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: DeviceLengths,
    ) -> torch.Tensor:
        output: torch.Tensor = self._function(
            query,
            keys,
            values,
            lengths.cu_seqlens_q,
            lengths.cu_seqlens_k,
            lengths.host.max_query_len,
            lengths.host.max_seqused,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window_of(layer) if layer.window is not None else (-1, -1),
            softcap=layer.soft_cap or 0.0,
            block_table=lengths.block_table,
        )
        return output


class FlashAttention3(Attention):
    """`flash_attn_with_kvcache` of FlashAttention-3 (`flash_attn_interface`), without new keys: they are written
    already."""

    def __init__(self, setup: AttentionSetup, function: Callable[..., Any] | None = None):
        super().__init__(setup)
        self._function = function or importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: DeviceLengths,
    ) -> torch.Tensor:
        output: torch.Tensor = self._function(
            query,
            keys,
            values,
            cache_seqlens=lengths.seqused_k,
            page_table=lengths.block_table,
            cu_seqlens_q=lengths.cu_seqlens_q,
            max_seqlen_q=lengths.host.max_query_len,
            softmax_scale=layer.scale,
            causal=True,
            window_size=window_of(layer) if layer.window is not None else (-1, -1),
            softcap=layer.soft_cap or 0.0,
        )
        return output


class _Turns:
    """Wrappers that take turns, each with an event behind the copies of its last plan."""

    def __init__(self, wrappers: list[Any]):
        self._wrappers = wrappers
        self._copied: list[torch.cuda.Event | None] = [None] * len(wrappers)
        self._turn = 0

    @property
    def current(self) -> Any:
        """The wrapper that was planned last."""
        return self._wrappers[self._turn]

    def begin(self) -> Any:
        """The next wrapper, once the device has copied what its last plan wrote."""
        self._turn = (self._turn + 1) % len(self._wrappers)
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        return self.current

    def end(self, device: torch.device) -> None:
        """Marks the copies of the plan that was made as issued."""
        if device.type == "cuda":
            event = self._copied[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event


class FlashInfer(Attention):
    """`BatchPrefillWithPagedKVCacheWrapper` of FlashInfer, which serves queries of any length; two in turn for each
    kind of layer.

    `plan` of a wrapper fills pinned memory that the wrapper keeps, and the device copies it later. So the plan of the
    next step, which is made while the device still works on this one, must not go through the same wrapper; and before
    the one after it does, the copies are waited for.
    """

    def __init__(self, setup: AttentionSetup, wrapper: Callable[..., Any] | None = None):
        super().__init__(setup)
        self._create = wrapper or importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=setup.device)
        self._wrappers: dict[tuple[Any, ...], _Turns] = {}

    def plan(self, layer: AttentionLayer, lengths: DeviceLengths) -> None:
        kind = kind_of(layer)
        if kind not in self._wrappers:
            self._wrappers[kind] = _Turns([self._create(self._workspace, "NHD") for _ in range(2)])
        turns = self._wrappers[kind]
        begins, pages, last = lengths.host.page_lists(self._setup.block_size)
        # Begins and lengths are read on the host first, so they stay there; the pages are read by the device only.
        turns.begin().plan(
            torch.from_numpy(lengths.host.cu_seqlens_q),
            torch.from_numpy(begins),
            to_device(pages, torch.device(self._setup.device)),
            torch.from_numpy(last),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_size,
            self._setup.block_size,
            causal=True,
            sm_scale=layer.scale,
            window_left=-1 if layer.window is None else layer.window - 1,
            logits_soft_cap=layer.soft_cap or 0.0,
            q_data_type=getattr(torch, self._setup.dtype),
            kv_data_type=getattr(torch, self._setup.spec.dtype),
        )
        turns.end(self._workspace.device)

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: DeviceLengths,
    ) -> torch.Tensor:
        output: torch.Tensor = self._wrappers[kind_of(layer)].current.run(query, (keys, values))
        return output


LIBRARIES: tuple[Library, ...] = (
    Library(
        "flash_attn_3",
        "flash_attn_interface",
        "install FlashAttention-3 from flash-attention/hopper; Hopper GPUs only",
        1,
        True,
        FlashAttention3,
        only_major=9,
    ),
    Library("flashinfer", "flashinfer", "pip install flashinfer-python", 1, True, FlashInfer),
    Library("flash_attn", "flash_attn", "pip install flash-attn", 256, True, FlashAttention2),
    Library("torch", "torch", "install torch 2.12 or later", 256, False, TorchVarlen),
)
"""In the order in which they are asked."""


def window_of(layer: AttentionLayer) -> tuple[int, int]:
    """Returns (keys to the left, keys to the right) that a query sees in addition to its own; -1: all."""
    return (-1 if layer.window is None else layer.window - 1, 0)


def kind_of(layer: AttentionLayer) -> tuple[int, float, int | None, float | None]:
    """What a plan of FlashInfer depends on."""
    return (layer.num_heads, layer.scale, layer.window, layer.soft_cap)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies to the device; from pinned memory where the device is a GPU, so that the host does not wait."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _takes_pages() -> bool:
    varlen = importlib.import_module("torch.nn.attention.varlen")
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters
