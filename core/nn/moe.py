"""Sparse mixture of experts (Shazeer et al. 2017; Mixtral, Jiang et al. 2024, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.nn.context import ModelContext
from dovetail.nn.linear import MergedColumnLinear, ReplicatedLinear, RowLinear
from dovetail.nn.mlp import GatedMLP, gated_activation


@dataclass(frozen=True)
class ExpertNames:
    """How a checkpoint calls the parts of a sparse block, below the block's own name."""

    router: str = "gate"
    experts: str = "experts"
    """Followed by the expert's number."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class SparseShape:
    """Sizes and routing rule of one sparse block."""

    hidden_size: int
    intermediate_size: int
    """Of one expert."""
    num_experts: int
    top_k: int
    normalize: bool
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    hidden_act: str
    shared_intermediate_size: int = 0
    """Size of an expert that every token visits, gated by a sigmoid (Qwen2-MoE); 0: there is none."""


class Expert(torch.nn.Module):
    """One expert; each rank computes part of its hidden units and returns its partial sum."""

    def __init__(self, context: ModelContext, name: str, shape: SparseShape, names: ExpertNames):
        super().__init__()
        size = shape.intermediate_size
        parts = {f"{name}.{names.gate}": size, f"{name}.{names.up}": size}
        self.gate_up_proj = MergedColumnLinear(context, f"{name}.gate_up_proj", shape.hidden_size, parts)
        self.down_proj = RowLinear(context, f"{name}.{names.down}", size, shape.hidden_size, reduce=False)
        self._activation = gated_activation(context, shape.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, hidden_size], to be summed over ranks."""
        partial: torch.Tensor = self.down_proj(self._activation(self.gate_up_proj(x)))
        return partial


class SparseMoE(torch.nn.Module):
    """Each token visits its top_k experts, weighted by the softmax of the router's logits.

    Tokens are sorted by expert, so that every expert that was chosen runs once and the others not at all. The order
    costs one synchronisation with the device per layer.
    """

    def __init__(self, context: ModelContext, name: str, shape: SparseShape, names: ExpertNames | None = None):
        super().__init__()
        names = names or ExpertNames()
        self._shape = shape
        self._communicator = context.communicator
        self.router = ReplicatedLinear(context, f"{name}.{names.router}", shape.hidden_size, shape.num_experts)
        self.experts = torch.nn.ModuleList(
            Expert(context, f"{name}.{names.experts}.{index}", shape, names) for index in range(shape.num_experts)
        )
        self._runs = list(self.experts)
        self.shared: SharedExpert | None = (
            SharedExpert(context, name, shape) if shape.shared_intermediate_size else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        weights, chosen = self.route(x)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // self._shape.top_k
        counts = chosen.flatten().bincount(minlength=self._shape.num_experts).tolist()
        inputs = torch.split(x[tokens], counts)
        parts = [run(part) for run, part in zip(self._runs, inputs, strict=True) if part.shape[0]]
        contributions = torch.cat(parts) * weights.flatten()[by_expert, None]
        output = torch.zeros_like(x).index_add_(0, tokens, contributions.to(x.dtype))
        if self.shared is not None:
            output = output + self.shared(x)
        return self._communicator.all_reduce(output)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (x's dtype) and numbers (int64) of each token's experts, both [T, top_k]."""
        probabilities = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self._shape.top_k, dim=-1)
        if self._shape.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


class SharedExpert(torch.nn.Module):
    """sigmoid(g x) * MLP(x), beside the routed experts; partial sums like theirs."""

    def __init__(self, context: ModelContext, name: str, shape: SparseShape):
        super().__init__()
        size = shape.shared_intermediate_size
        self.gate = ReplicatedLinear(context, f"{name}.shared_expert_gate", shape.hidden_size, 1)
        self.mlp = GatedMLP(context, f"{name}.shared_expert", shape.hidden_size, size, shape.hidden_act, reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        output: torch.Tensor = self.gate(x).sigmoid() * self.mlp(x)
        return output
