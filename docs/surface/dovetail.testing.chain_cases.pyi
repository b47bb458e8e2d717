import torch
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chains:
    target: torch.Tensor
    draft: torch.Tensor
    token_ids: torch.Tensor
    starts: torch.Tensor
    accept_uniforms: torch.Tensor
    recover_uniforms: torch.Tensor
    @property
    def arguments(self) -> tuple[torch.Tensor, ...]: ...
    def only(self, r: int) -> Chains: ...
    def expected(self) -> list[tuple[int, int]]: ...

def random_chains(sizes: Sequence[int], vocab_size: int, device: str = 'cpu') -> Chains: ...
