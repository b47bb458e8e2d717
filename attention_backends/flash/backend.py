"""Attention through FlashAttention, as far as one of the libraries that offer it is installed."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch

from dovetail.attention_backends.flash.libraries import LIBRARIES, Attention, DeviceLengths, Library, kind_of, to_device
from dovetail.attention_backends.flash.plan import PagedLengths
from dovetail.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionNeed,
    AttentionSetup,
)
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import DeviceInfo, Environment, PluginOptions

_SMALLEST_ARCH = (8, 0)
_LARGEST_HEAD = 256


class FlashOptions(PluginOptions):
    """Options of the `flash` backend."""

    library: Literal["any", "flash_attn_3", "flashinfer", "flash_attn", "torch"] = "any"
    """Which library computes. "any": the first that is installed and can serve the model, in the order of this list; a
    library that is named is used or refused."""


class FlashBackend(AttentionBackend):
    """A page holds keys then values, [2, block_size, num_kv_heads, head_size], which all of the libraries read in
    place. New tokens are written by torch.
    """

    contract = (1, 0)
    preference: ClassVar[int] = 6
    Options = FlashOptions
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        sliding_window=True,
        soft_cap=True,
    )

    @classmethod
    def check(cls, need: AttentionNeed, options: Any, environment: Environment) -> list[str]:
        """A GPU from Ampere on, and a library that serves the model."""
        if any(size > _LARGEST_HEAD or size % 8 for size in need.head_sizes):
            sizes = ", ".join(map(str, sorted(need.head_sizes)))
            return [f"{cls.__name__} serves multiples of 8 up to {_LARGEST_HEAD} as head sizes; the model has {sizes}."]
        if not environment.devices:
            why = environment.no_devices or "torch sees none; look at `nvidia-smi` and at torch.version.cuda"
            return [f"{cls.__name__} needs a CUDA GPU: {why}."]
        device = min(environment.devices, key=lambda device: device.compute_capability)
        if device.compute_capability < _SMALLEST_ARCH:
            return [f"{cls.__name__} needs compute capability 8.0 (Ampere) or later, which {device.name} has not."]
        against = {library.name: library.against(need, environment.devices) for library in asked(options)}
        if any(not found for found in against.values()):
            return []
        listed = "; ".join(reason for found in against.values() for reason in found)
        return [f"{cls.__name__} finds no library that serves this model: {listed}."]

    def __init__(self, options: FlashOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        if setup.spec.dtype != setup.dtype:
            raise ConfigError(f"flash keeps keys and values in the model's dtype, {setup.dtype}; set cache.dtype.")
        self._device = torch.device(setup.device)
        self._attention = self._create_attention(options, setup)
        self._windows = {layer.window for layer in setup.layers}
        self._lengths: dict[int | None, DeviceLengths] = {}
        self._pages = self._offsets = torch.empty(0, dtype=torch.int64)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, 2 (key, value), block_size, num_kv_heads, head_size]."""
        spec = self.setup.spec
        return (num_blocks, 2, self.setup.block_size, spec.num_kv_heads, spec.head_size)

    def plan(self, batch: AttentionBatch) -> None:
        """Copies lengths and tables to the device, once for each window."""
        self._lengths.clear()
        if len(batch.slot_mapping) == 0:
            return
        block_size = self.setup.block_size
        self._pages = to_device(batch.slot_mapping // block_size, self._device)
        self._offsets = to_device(batch.slot_mapping % block_size, self._device)
        for window in self._windows:
            lengths = PagedLengths.of(batch, window, block_size)
            self._lengths[window] = DeviceLengths.of(lengths, self._device)
        for layer in {kind_of(layer): layer for layer in self.setup.layers}.values():
            self._attention.plan(layer, self._lengths[layer.window])

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the new tokens, then calls the library."""
        if len(query) == 0:
            return torch.empty_like(query)
        kv_cache[self._pages, 0, self._offsets] = key
        kv_cache[self._pages, 1, self._offsets] = value
        keys, values = kv_cache[:, 0], kv_cache[:, 1]
        return self._attention.attend(layer, query, keys, values, self._lengths[layer.window])

    def _create_attention(self, options: FlashOptions, setup: AttentionSetup) -> Attention:
        return create_attention(options, setup)


def create_attention(options: FlashOptions, setup: AttentionSetup) -> Attention:
    """The first library asked for that serves the setup. Raises `ConfigError` where there is none."""
    device = torch.device(setup.device)
    need = AttentionNeed(
        device_type=device.type,
        dtype=setup.dtype,
        block_size=setup.block_size,
        head_sizes=frozenset({setup.spec.head_size}),
        soft_cap=any(layer.soft_cap is not None for layer in setup.layers),
    )
    devices = (_device_info(device),)
    reasons = []
    for library in asked(options):
        found = library.against(need, devices)
        if not found:
            return library.create(setup)
        reasons += found
    raise ConfigError(f"flash finds no library that serves this model: {'; '.join(reasons)}.")


def _device_info(device: torch.device) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(device)
    return DeviceInfo(properties.name, properties.total_memory, (properties.major, properties.minor))


def asked(options: FlashOptions) -> list[Library]:
    """The libraries that come into question."""
    return [library for library in LIBRARIES if options.library in ("any", library.name)]
