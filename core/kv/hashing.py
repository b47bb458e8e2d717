"""Content hashes of full blocks: a chain, so that one hash stands for a block's tokens and all before them."""

from __future__ import annotations

from array import array
from hashlib import blake2b

DIGEST_BYTES = 32


def prefix_seed(weight_version: int, adapter: str | None, cache_salt: str | None) -> bytes:
    """16 bytes from which the block hashes of a sequence start. Sequences share cached blocks only where all of these
    are equal: the version of the weights, the adapter on top of them, and the salt that the user gave."""
    return blake2b(repr((weight_version, adapter, cache_salt)).encode(), digest_size=16).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: list[int], num_blocks: int, block_size: int, seed: bytes
) -> None:
    """Appends to `hashes` until it covers the first `num_blocks` blocks of `token_ids`, which must be full.

    Hash i = BLAKE2b(hash i - 1, tokens of block i as int32). Before the first stands a digest of `seed` made under
    another personalization, so that no choice of seed continues another chain.
    """
    parent = hashes[-1] if hashes else blake2b(seed, digest_size=DIGEST_BYTES, person=b"dovetail-seed").digest()
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
