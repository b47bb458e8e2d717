"""Sparse mixture of experts (Shazeer et al. 2017; Mixtral, Jiang et al. 2024, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from dovetail.contracts.model import ModelContext
from dovetail.contracts.operators import MultipliesGroups
from dovetail.contracts.quantization import LinearKernel
from dovetail.nn.adapters import without_adapters
from dovetail.nn.collectives import CallsCollectives, Collective
from dovetail.nn.kernels import TorchLinear
from dovetail.nn.linear import MergedColumnLinear, ReplicatedLinear, RowLinear
from dovetail.nn.mlp import GatedMLP, gated_activation
from dovetail.nn.routing import GroupRouter, GroupRouting, sigmoid_by_rows
from dovetail.nn.waiting import MayWait


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of the parts of a sparse block in a checkpoint, below the block's own name."""

    router: str = "gate"
    experts: str = "experts"
    """Prefix of an expert's name, followed by its number."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


@dataclass(frozen=True, kw_only=True)
class SparseShape:
    """Sizes and routing rule of one sparse block."""

    hidden_size: int
    intermediate_size: int
    """Number of hidden units of one expert."""
    num_experts: int
    top_k: int
    normalize: bool
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    hidden_act: str
    shared_intermediate_size: int = 0
    """Number of hidden units of the shared expert, which every token visits, gated by a sigmoid (Qwen2-MoE); 0: there
    is none."""
    has_sigmoid: bool = False
    """Whether an expert's weight is the sigmoid of its own logit instead of the softmax over all logits."""
    weighs_inputs: bool = False
    """Whether the weight multiplies an expert's input instead of its output (Llama 4)."""
    shared_gate: bool = True
    """Whether the shared expert has the sigmoid gate."""
    routing: GroupRouting | None = None
    """Takes the place of `normalize` and `has_sigmoid`: experts are chosen group by group, by a router in float32."""


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


class SparseMoE(torch.nn.Module, MayWait, CallsCollectives):
    """Each token visits its top_k experts, weighted by softmax or sigmoid of the router's logits.

    Tokens are sorted by expert, so that every chosen expert runs once and the others do not run. This synchronises with
    the device once per layer, unless the operator set multiplies groups: then the experts' weights are stacked, and the
    host does not wait. Quantized experts run one by one.
    """

    def __init__(self, context: ModelContext, name: str, shape: SparseShape, names: ExpertNames | None = None):
        super().__init__()
        names = names or ExpertNames()
        self._shape = shape
        self._communicator = context.communicator
        self.router = _router(context, f"{name}.{names.router}", shape)
        with without_adapters(context):
            self.experts = torch.nn.ModuleList(
                Expert(context, f"{name}.{names.experts}.{index}", shape, names) for index in range(shape.num_experts)
            )
        self._runs = cast(list[Expert], list(self.experts))
        self._activation = gated_activation(context, shape.hidden_act)
        self._stacked: tuple[torch.Tensor, torch.Tensor] | None = None
        """Of all experts, gate and up, and down; made when the block first runs."""
        first = self._runs[0]
        kernels = first.gate_up_proj.kernel, first.down_proj.kernel
        operators, is_plain = context.operators, all(isinstance(kernel, TorchLinear) for kernel in kernels)
        self._grouping = operators if is_plain and isinstance(operators, MultipliesGroups) else None
        self.shared = _shared_expert(context, f"{name}.{names.shared}", shape)

    def why_it_waits(self) -> str | None:
        """Without grouped products, for the number of rows of each expert."""
        if self._grouping is not None:
            return None
        return (
            "a mixture of experts waits for the number of tokens of each expert, unless its weights are unquantized "
            "and model.operators multiply groups, as triton does"
        )

    def collectives(self) -> tuple[Collective, ...]:
        """The sum of the experts' parts."""
        is_shared = self._communicator.size > 1
        return (Collective("all_reduce", self._shape.hidden_size),) if is_shared else ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        weights, chosen = self.route(x)
        by_expert = chosen.flatten().argsort(stable=True)
        tokens, experts = by_expert // self._shape.top_k, chosen.flatten()[by_expert]
        run = self._run_each if self._grouping is None else partial(self._run_grouped, self._grouping)
        shares = weights.flatten()[by_expert, None]
        if self._shape.weighs_inputs:
            contributions = run((x[tokens] * shares).to(x.dtype), experts)
        else:
            contributions = run(x[tokens], experts) * shares
        output = _summed(contributions, by_expert, self._shape.top_k).to(x.dtype)
        if self.shared is not None:
            output = output + self.shared(x)
        return self._communicator.all_reduce(output)

    def _run_each(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        counts = experts.bincount(minlength=self._shape.num_experts).tolist()
        inputs = torch.split(x, counts)
        return torch.cat([run(part) for run, part in zip(self._runs, inputs, strict=True) if part.shape[0]])

    def _run_grouped(self, operators: MultipliesGroups, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        if self._stacked is None:
            self._stacked = (
                _stack([expert.gate_up_proj.kernel for expert in self._runs]),
                _stack([expert.down_proj.kernel for expert in self._runs]),
            )
        numbers = torch.arange(self._shape.num_experts + 1, dtype=experts.dtype, device=experts.device)
        starts = torch.searchsorted(experts, numbers, out_int32=True)
        gate_up = operators.grouped_linear(x, self._stacked[0], starts)
        return operators.grouped_linear(self._activation(gate_up), self._stacked[1], starts)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights (x's dtype, or float32) and numbers (int64) of each token's experts, both [T, top_k]."""
        if isinstance(self.router, GroupRouter):
            weights, chosen = self.router(x)
            return weights, chosen
        if self._shape.has_sigmoid:
            weights, chosen = self.router(x).float().topk(self._shape.top_k, dim=-1)
            return sigmoid_by_rows(weights).to(x.dtype), chosen
        probabilities = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self._shape.top_k, dim=-1)
        if self._shape.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen


def _summed(contributions: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sums the `top_k` contributions of each token in float32, in the order of the token's choice: float32
    [T, hidden_size] from [T * top_k, hidden_size], whose row i is contribution order[i]. Adding rows where they stand
    (index_add_) would be another sum in every run on GPUs."""
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return contributions[places].view(-1, top_k, contributions.shape[1]).sum(1, dtype=torch.float32)


def _stack(kernels: Sequence[LinearKernel]) -> torch.Tensor:
    """Stacks the weights of kernels; from now on the kernels hold views of the stack."""
    plain = [kernel for kernel in kernels if isinstance(kernel, TorchLinear)]
    stacked = torch.stack([kernel.weight for kernel in plain])
    for kernel, weight in zip(plain, stacked, strict=True):
        kernel.weight = weight
    return stacked


def _router(context: ModelContext, name: str, shape: SparseShape) -> GroupRouter | ReplicatedLinear:
    if shape.routing is not None:
        return GroupRouter(context, name, shape.hidden_size, shape.routing)
    return ReplicatedLinear(context, name, shape.hidden_size, shape.num_experts)


def _shared_expert(context: ModelContext, name: str, shape: SparseShape) -> torch.nn.Module | None:
    size = shape.shared_intermediate_size
    if not size:
        return None
    if shape.shared_gate:
        return SharedExpert(context, name, shape)
    return GatedMLP(context, name, shape.hidden_size, size, shape.hidden_act, reduce=False)


class SharedExpert(torch.nn.Module):
    """sigmoid(g x) * MLP(x), with the routed experts; partial sums like theirs."""

    def __init__(self, context: ModelContext, name: str, shape: SparseShape):
        super().__init__()
        size = shape.shared_intermediate_size
        self.gate = ReplicatedLinear(context, f"{name}_gate", shape.hidden_size, 1)
        self.mlp = GatedMLP(context, name, shape.hidden_size, size, shape.hidden_act, reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        output: torch.Tensor = sigmoid_by_rows(self.gate(x)) * self.mlp(x)
        return output
