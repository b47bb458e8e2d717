"""Random steps of whole sequences whose queries see all keys of their own sequence, with the results of brute force."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dovetail.contracts.attention import AttendsBothWays, AttentionBackend, AttentionBatch, TransientSpec
from dovetail.testing.attention_cases import AttentionCase, CaseShape, random_case


@dataclass(frozen=True)
class BothWaysCase(AttentionCase):
    """One step over requests without a past, in a layer that is not causal."""

    def batch(self) -> AttentionBatch:
        """Returns the step's batch, without pages."""
        batch = super().batch()
        return replace(batch, block_table=batch.block_table[:, :0], slot_mapping=batch.slot_mapping[:0])

    def run(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> torch.Tensor:
        """Runs the step; `kv_cache` is not used."""
        assert isinstance(backend, AttendsBothWays), "a backend that declares bidirectional is an AttendsBothWays"
        backend.plan(self.batch())
        return backend.both_ways_forward(self.layer, *self.inputs())

    def filled_cache(self, backend: AttentionBackend, padding: int = 0) -> torch.Tensor:
        """Nothing: there are no pages."""
        return torch.empty(0)


def random_both_ways_case(seed: int, shape: CaseShape) -> BothWaysCase:
    """A case drawn from `seed`, as `random_case`; features are left out of `shape`. Some sequences are of one
    length."""
    rng = np.random.default_rng((seed, 2))
    lengths = rng.integers(1, shape.max_query + 1, size=int(rng.integers(1, shape.max_requests + 1)))
    lengths = rng.choice(lengths, size=len(lengths))  # some of them several times
    plain = CaseShape(
        dtype=shape.dtype,
        device=shape.device,
        block_size=shape.block_size,
        head_size=shape.head_size,
        lengths=shape.lengths or tuple((int(length), 0) for length in lengths),
    )
    case = random_case(seed, plain)
    layers = tuple(replace(layer, causal=False) for layer in case.setup.layers)
    kept = case.setup.spec
    spec = TransientSpec(num_kv_heads=kept.num_kv_heads, head_size=kept.head_size, dtype=kept.dtype)
    setup = replace(case.setup, layers=layers, spec=spec)
    return BothWaysCase(setup, case.num_blocks, case.requests)
