"""Averages hidden states, later tokens more than earlier ones."""

import torch

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.pooling import Pooler, PoolerCapabilities, PoolingState
from dovetail.contracts.pooling_params import EMBED


class Options(PluginOptions):
    power: float = 1.0


class Frozen(Pooler):
    contract = (1, 0)
    Options = Options
    preference = -100
    capabilities = PoolerCapabilities(tasks=frozenset({EMBED}), modes=frozenset({"weightedmean"}))

    def start(self, num_tokens: int) -> PoolingState:
        return WeightedSum(self.options.power)


class WeightedSum(PoolingState):
    def __init__(self, power: float):
        self._power = power
        self._sum = 0.0
        self._weights = 0.0

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        numbers = torch.arange(positions.start, positions.stop, dtype=torch.float64, device=hidden.device)
        weights = (numbers + 1) ** self._power
        self._sum = self._sum + weights @ hidden.double()
        self._weights += weights.sum().item()

    def finish(self) -> torch.Tensor:
        return (self._sum / self._weights).float()
