"""Random steps over pages of latent vectors, with the results of attention that knows no absorption.

The oracle computes keys and values of every head from the latent vectors and attends to these, pair by pair in float64
(DeepSeek-V2, section 2.1); the backend gets queries that were multiplied by the up-projection of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dovetail.contracts.attention import AttendsLatents, AttentionBackend
from dovetail.contracts.kv import LatentSpec
from dovetail.testing.attention_cases import AttentionCase, CaseRequest, CaseShape, attended_by_pairs, random_case


@dataclass(frozen=True, kw_only=True)
class LatentCase(AttentionCase):
    """One step over requests whose `keys` are latent vectors [seq_len, 1, latent_size + rotary_size], and whose
    `query` [query_len, num_heads, key_size + rotary_size] is the one before the absorption."""

    key_up: np.ndarray
    """float64 [num_heads, key_size, latent_size]. Each column has one element, 1 or -1, so that absorbing it into a
    query rounds nothing in any dtype."""
    value_up: np.ndarray
    """float64 [num_heads, latent_size, latent_size]: orthogonal, so that what was attended to follows from values."""

    @property
    def latent(self) -> LatentSpec:
        """What the layer caches."""
        assert self.setup.latent is not None
        return self.setup.latent

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Absorbed queries and the new latent vectors [T, 1, latent_size + rotary_size]; the latter twice, as keys and
        as values."""
        query, latent, _ = super().inputs()
        key_size = self.key_up.shape[1]
        key_up = torch.from_numpy(self.key_up).to(query)
        absorbed = torch.einsum("thk,hkl->thl", query[..., :key_size], key_up)
        return torch.cat((absorbed, query[..., key_size:]), dim=-1), latent, latent

    def forward(
        self,
        backend: AttentionBackend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """`latent_forward`, with `key` as the latent vectors."""
        assert isinstance(backend, AttendsLatents), "a backend that declares latents is an AttendsLatents"
        return backend.latent_forward(self.layer, query, key[:, 0], kv_cache)

    def expected(self) -> torch.Tensor:
        """[T, num_heads, latent_size]: what gives the values that attention over keys and values of all heads gives."""
        return torch.from_numpy(np.concatenate([self._expected(request) for request in self.requests]))

    def _expected(self, request: CaseRequest) -> np.ndarray:
        query, vectors = (x.to(torch.float64).numpy() for x in (request.query, request.keys))
        latents, shared_keys = np.split(vectors[:, 0], [self.latent.latent_size], axis=1)
        keys = np.einsum("sl,hkl->shk", latents, self.key_up)
        shared = np.broadcast_to(shared_keys[:, None], (*keys.shape[:2], self.latent.rotary_size))
        values = np.einsum("sl,hvl->shv", latents, self.value_up)
        attended = attended_by_pairs(self.layer, request, query, np.concatenate((keys, shared), axis=2), values)
        return np.einsum("thv,hvl->thl", attended, self.value_up)


def random_latent_case(seed: int, shape: CaseShape, latent_size: int, rotary_size: int) -> LatentCase:
    """A case drawn from `seed`, as `random_case`; features other than trees are left out of `shape`."""
    head_size = latent_size + rotary_size
    case = random_case(seed, replace(shape, head_size=head_size, num_kv_heads=1))
    rng = np.random.default_rng((seed, latent_size))
    num_heads, key_size = case.layer.num_heads, int(rng.integers(1, latent_size + 1))
    spec = LatentSpec(latent_size=latent_size, rotary_size=rotary_size, dtype=shape.dtype)
    kept = list(range(key_size)) + list(range(latent_size, head_size))
    requests = tuple(replace(request, query=request.query[..., kept]) for request in case.requests)
    key_up = np.zeros((num_heads, key_size, latent_size))
    for of_head in key_up:
        of_head[rng.integers(0, key_size, latent_size), np.arange(latent_size)] = rng.choice([-1, 1], latent_size)
    value_up = np.linalg.qr(rng.standard_normal((num_heads, latent_size, latent_size)))[0]
    return LatentCase(replace(case.setup, spec=spec), case.num_blocks, requests, key_up=key_up, value_up=value_up)
