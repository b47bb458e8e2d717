"""Routers of sparse mixtures of experts that choose among groups of experts first (DeepSeek-V2, section 2.2.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelContext
from dovetail.nn.kernels import plain_kernel
from dovetail.nn.loading import WeightHolder


@dataclass(frozen=True, kw_only=True)
class GroupRouting:
    """How experts are chosen and weighted."""

    num_experts: int
    top_k: int
    num_groups: int = 1
    """Groups of equally many experts, one behind the other."""
    top_groups: int = 1
    """Groups with the highest scores, whose experts may be chosen. The score of a group is that of its best expert, or
    with `has_bias` the sum of its two best (DeepSeek-V3, section 2.1.2)."""
    has_sigmoid: bool = False
    """Whether an expert's score is the sigmoid of its own logit instead of the softmax over all logits."""
    has_bias: bool = False
    """Whether a bias per expert, which balances their load, is added to the scores for the choice alone."""
    normalize: bool = False
    """Whether the weights of the chosen experts are scaled to sum to 1, before `factor`."""
    factor: float = 1.0
    """Factor of all weights."""

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise ModelError(f"{self.num_experts} experts cannot be divided into {self.num_groups} groups")
        size = self.num_experts // self.num_groups
        if not 1 <= self.top_groups <= self.num_groups or not 1 <= self.top_k <= self.top_groups * size:
            raise ModelError(
                f"{self.top_k} experts cannot be chosen from {self.top_groups} of {self.num_groups} groups of {size}"
            )
        if self.has_bias and size < 2:
            raise ModelError("groups of one expert have no two best ones")


class GroupRouter(WeightHolder):
    """Weights and numbers of each token's experts. Everything is computed in float32: near ties, rounding would choose
    other experts. Every rank holds all of it, never quantized."""

    def __init__(self, context: ModelContext, name: str, hidden_size: int, routing: GroupRouting):
        super().__init__()
        self._name, self._routing = name, routing
        self._shape = (routing.num_experts, hidden_size)
        weight = context.empty(*self._shape, dtype=torch.float32)
        self.kernel = plain_kernel(weight, batch_invariant=context.batch_invariant)
        self.bias = context.empty(routing.num_experts, dtype=torch.float32) if routing.has_bias else None

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The weight, and the bias where there is one."""
        bias = {} if self.bias is None else {f"{self._name}.e_score_correction_bias": self._shape[:1]}
        return {f"{self._name}.weight": self._shape, **bias}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Every rank keeps all of it."""
        if self.bias is not None and name.endswith("_bias"):
            self.bias.copy_(tensor)
        else:
            self.kernel.load(slice(0, self._shape[0]), tensor)

    def finish(self) -> None:
        """Lets the kernel pack its weights."""
        self.kernel.finish()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden_size] -> weights (float32) and numbers (int64) of each token's experts, both [T, top_k]."""
        routing = self._routing
        logits = self.kernel.apply(x.float(), None)
        scores = sigmoid_by_rows(logits) if routing.has_sigmoid else torch.softmax(logits, dim=-1)
        chosen = self._among_groups(scores if self.bias is None else scores + self.bias).topk(routing.top_k).indices
        weights = scores.gather(1, chosen)
        if routing.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * routing.factor, chosen

    def _among_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, -inf outside of each token's best groups."""
        routing = self._routing
        if routing.top_groups == routing.num_groups:
            return scores
        by_group = scores.view(len(scores), routing.num_groups, -1)
        of_groups = by_group.topk(2 if routing.has_bias else 1).values.sum(dim=-1)
        best = of_groups.topk(routing.top_groups).indices
        is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, best, False)
        return by_group.masked_fill(is_out[..., None], -torch.inf).flatten(1)


def sigmoid_by_rows(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid as the softmax of (x, 0): torch's scalar loop at the end of a tensor gives other bits than its vector
    loop."""
    return torch.softmax(torch.stack((x, torch.zeros_like(x)), dim=-1), dim=-1)[..., 0]
