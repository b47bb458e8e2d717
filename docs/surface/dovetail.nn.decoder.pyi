import torch
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from dovetail.contracts.model import ModelContext
from dovetail.nn.hf_config import Config
from dovetail.nn.loading import WeightRules
from dovetail.nn.norm import OffsetRMSNorm, RMSNorm
from dovetail.nn.rope import Rotation
from dovetail.nn.stages import StagedCausalLM


@dataclass(frozen=True, kw_only=True)
class AttentionStyle:
    windows: Sequence[int | None]
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: type[RMSNorm] | type[OffsetRMSNorm] | None = None
    scale: float | None = None
    soft_cap: float | None = None

MakeMLP = Callable[[ModelContext, str, int], torch.nn.Module]
MakeAttention = Callable[[ModelContext, str, int], torch.nn.Module]

class SelfAttention(torch.nn.Module):
    def __init__(
        self,
        context: ModelContext,
        config: Config,
        style: AttentionStyle,
        name: str,
        window: int | None,
    ): ...
    qkv_proj: ...
    o_proj: ...
    q_norm: torch.nn.Module | None
    k_norm: torch.nn.Module | None
    attention: ...
    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor: ...

def self_attention(config: Config, style: AttentionStyle) -> MakeAttention: ...

class DecoderLayer(torch.nn.Module):
    def __init__(
        self,
        context: ModelContext,
        config: Config,
        make_attention: MakeAttention,
        make_mlp: MakeMLP,
        name: str,
        index: int,
    ): ...
    input_layernorm: ...
    self_attn: ...
    post_attention_layernorm: ...
    mlp: ...
    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class DecoderModel(StagedCausalLM):
    gives_hidden_layers = True
    skips_layers = True
    def __init__(
        self,
        context: ModelContext,
        config: Config,
        rotary: torch.nn.Module,
        make_attention: MakeAttention,
        make_mlp: MakeMLP,
        rules: WeightRules | None = None,
    ): ...
    rotary: torch.nn.Module
    def run_layers(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def run_other_layers(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        skipped: Set[int],
    ) -> torch.Tensor: ...
