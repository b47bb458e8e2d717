"""The hashes of a prompt's blocks, computed where the engine is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.engine.kv.hashing import drafter_seed, extend_block_hashes, seed_over


@dataclass(frozen=True)
class PrefixFacts:
    """What the block hashes of an engine follow from besides tokens, adapters and salts. Equal in all replicas, until
    their weights are replaced."""

    pages_digest: bytes
    """`PagesIdentity.digest`."""
    drafters: Mapping[str, int]
    """By drafter whose pages are part of the blocks, the tokens behind a block that its content depends on."""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> PrefixFacts:
        """From what an engine answers to a client that follows its prefix cache."""
        return cls(bytes.fromhex(plain["pages"]), plain["drafters"])

    def block_hashes(
        self, token_ids: list[int], block_size: int, *, adapter: str | None, salt: str | None, drafter: str | None
    ) -> tuple[bytes, ...]:
        """Hashes of the full blocks of a prompt, as the engine computes them. `adapter`: its digest."""
        seed = seed_over(self.pages_digest, adapter, salt)
        ahead = 0
        if drafter is not None and drafter in self.drafters:
            seed, ahead = drafter_seed(seed, drafter), self.drafters[drafter]
        hashes: list[bytes] = []
        extend_block_hashes(hashes, token_ids, max(0, len(token_ids) - ahead) // block_size, block_size, seed, ahead)
        return tuple(hashes)
