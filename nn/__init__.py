"""Building blocks for model families, public and versioned like a contract.

A family builds its module from these blocks and gives each the context and its name in the checkpoint. It gets tensor
parallelism, quantization and paged attention without code of its own. Blocks own their weights, plain tensors that are
created on the context's device and filled by `load_weights`.
"""

from __future__ import annotations

from dovetail.contracts.model import Communicator, ModelContext
from dovetail.contracts.plugin import ContractVersion
from dovetail.nn.adapters import AdapterSpace, LayerAdapters, LowRank
from dovetail.nn.attention import Attention
from dovetail.nn.collectives import CallsCollectives, Collective
from dovetail.nn.communicator import SingleProcess, TorchDistributed
from dovetail.nn.context import BuildContext
from dovetail.nn.embedding import LMHead, VocabEmbedding
from dovetail.nn.encoder_attention import EncoderAttention
from dovetail.nn.kernels import PackedLinear, TiledLinear, TorchLinear, plain_kernel
from dovetail.nn.latent_attention import LatentAttention, LatentShape
from dovetail.nn.linear import (
    ColumnLinear,
    Linear,
    LinearPart,
    MergedColumnLinear,
    QKVLinear,
    ReplicatedLinear,
    RowLinear,
)
from dovetail.nn.loading import WeightHolder, WeightRules, expected_shapes, load_weights, num_parameters
from dovetail.nn.mlp import GatedMLP, PlainMLP, activation, gated_activation
from dovetail.nn.moe import ExpertNames, SparseMoE, SparseShape
from dovetail.nn.norm import LayerNorm, OffsetRMSNorm, RMSNorm
from dovetail.nn.operators import TorchOperators, torch_operators
from dovetail.nn.rope import RopeSpec, RotaryEmbedding, Rotation, halves_from_pairs
from dovetail.nn.routing import GroupRouter, GroupRouting
from dovetail.nn.stages import StagedCausalLM, check_inputs, check_whole
from dovetail.nn.waiting import MayWait

__all__ = [
    "VERSION",
    "AdapterSpace",
    "Attention",
    "BuildContext",
    "CallsCollectives",
    "Collective",
    "ColumnLinear",
    "Communicator",
    "EncoderAttention",
    "ExpertNames",
    "GatedMLP",
    "GroupRouter",
    "GroupRouting",
    "LMHead",
    "LatentAttention",
    "LatentShape",
    "LayerAdapters",
    "LayerNorm",
    "Linear",
    "LinearPart",
    "LowRank",
    "MayWait",
    "MergedColumnLinear",
    "ModelContext",
    "OffsetRMSNorm",
    "PackedLinear",
    "PlainMLP",
    "QKVLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RopeSpec",
    "RotaryEmbedding",
    "Rotation",
    "RowLinear",
    "SingleProcess",
    "SparseMoE",
    "SparseShape",
    "StagedCausalLM",
    "TiledLinear",
    "TorchDistributed",
    "TorchLinear",
    "TorchOperators",
    "VocabEmbedding",
    "WeightHolder",
    "WeightRules",
    "activation",
    "check_inputs",
    "check_whole",
    "expected_shapes",
    "gated_activation",
    "halves_from_pairs",
    "load_weights",
    "num_parameters",
    "plain_kernel",
    "torch_operators",
]

VERSION = ContractVersion(1, 8)
"""Version of this package's public modules, shared by all of them."""
