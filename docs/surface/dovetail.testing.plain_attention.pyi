import torch
from dataclasses import replace
from dovetail.contracts.attention import AttendsBothWays, AttendsLatents, AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSetup, MovesSlots
from dovetail.contracts.plugin import PluginOptions
from typing import ClassVar


class PlainAttention(MovesSlots):
    contract = (1, 0)
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(device_types=frozenset({'cpu'}), dtypes=frozenset({'float32'}), sliding_window=True, soft_cap=True, alibi=True, trees=True, chunked=True)
    def __init__(self, options: PluginOptions, setup: AttentionSetup): ...
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]: ...
    def plan(self, batch: AttentionBatch) -> None: ...
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor: ...
    def move_slots(
        self,
        kv_cache: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> None: ...


class PlainLatentAttention(PlainAttention, AttendsLatents):
    contract = (1, 1)
    capabilities: ClassVar[AttentionCapabilities] = replace(PlainAttention.capabilities, latents=True)
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]: ...
    def latent_forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        latent: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor: ...


class PlainBothWaysAttention(PlainLatentAttention, AttendsBothWays):
    contract = (1, 2)
    capabilities: ClassVar[AttentionCapabilities] = replace(PlainLatentAttention.capabilities, bidirectional=True)
    def __init__(self, options: PluginOptions, setup: AttentionSetup): ...
    def plan(self, batch: AttentionBatch) -> None: ...
    def both_ways_forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor: ...
