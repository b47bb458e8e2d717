"""The operators in plain torch."""

import torch

from dovetail.contracts.operators import Operators, OperatorsCapabilities


class Frozen(Operators):
    contract = (1, 0)
    preference = -100
    capabilities = OperatorsCapabilities(device_types=None, dtypes=None)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normed * weight).to(x.dtype).contiguous()

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = cos.shape[-1]
        turned = heads[..., :size]
        swapped = turned.roll(size // 2, dims=-1)
        return torch.cat([turned * cos + swapped * sin, heads[..., size:]], dim=-1)
