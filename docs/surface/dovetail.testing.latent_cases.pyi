import numpy as np, torch
from dataclasses import dataclass
from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.kv import LatentSpec
from dovetail.testing.attention_cases import AttentionCase, CaseShape


@dataclass(frozen=True, kw_only=True)
class LatentCase(AttentionCase):
    key_up: np.ndarray
    value_up: np.ndarray
    @property
    def latent(self) -> LatentSpec: ...
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def forward(
        self,
        backend: AttentionBackend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor: ...
    def expected(self) -> torch.Tensor: ...

def random_latent_case(
    seed: int,
    shape: CaseShape,
    latent_size: int,
    rotary_size: int,
) -> LatentCase: ...
