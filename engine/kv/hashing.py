"""Content hashes of full blocks: a chain, so that one hash stands for a block's tokens and all before them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from dovetail.contracts.kv import KVLayout

DIGEST_BYTES = 32


@dataclass(frozen=True)
class PagesIdentity:
    """All that the numbers in KV pages follow from but tokens. Pages of two engines may be exchanged only where it is
    equal, and what a sequence finds in the prefix cache was computed under it."""

    weights: tuple[tuple[str, int, int], ...]
    """Name, size in bytes and time of change in nanoseconds of each file of the checkpoint."""
    weight_version: int
    """Of the weights: each replacement has a higher one."""
    weight_checksum: str
    """Of the tensors that replaced the weights; empty for those of the checkpoint's files."""
    plugins: str
    """Hash of the chosen plugins with their options: model family, quantization, attention backend and the others."""
    dtype: str
    """Of weights and activations."""
    adapter_dtype: str
    """Of adapters, where it is another one; otherwise empty."""
    kv_dtype: str
    layout: KVLayout
    tensor_parallel: int
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty for one."""

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it."""
        return blake2b(repr(self).encode(), digest_size=DIGEST_BYTES).digest()


def prefix_seed(pages: PagesIdentity, adapter: str | None, cache_salt: str | None) -> bytes:
    """16 bytes from which the block hashes of a sequence start. Sequences share cached blocks only where all of these
    are equal: what pages follow from, the adapter over the weights, and the salt that the user gave."""
    return seed_over(pages.digest, adapter, cache_salt)


def seed_over(pages_digest: bytes, adapter: str | None, cache_salt: str | None) -> bytes:
    """As `prefix_seed`, from `PagesIdentity.digest`."""
    return blake2b(repr((pages_digest, adapter, cache_salt)).encode(), digest_size=16).digest()


def drafter_seed(seed: bytes, drafter: str) -> bytes:
    """16 bytes: `seed` for sequences whose blocks hold pages of a drafter's own layers besides, filled by that drafter
    alone."""
    return blake2b(repr((seed, drafter)).encode(), digest_size=16).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: list[int], num_blocks: int, block_size: int, seed: bytes, ahead: int = 0
) -> None:
    """Appends to `hashes` until it covers the first `num_blocks` blocks of `token_ids`, which must be full.

    Hash i = BLAKE2b(hash i - 1, tokens of block i as int32). Before the first stands a digest of `seed` made under
    another personalization, so that no choice of seed continues another chain.

    `ahead`: how many tokens behind a block its content depends on. Its hash then covers these as well: each takes in
    the tokens that lie so much further on, and the first ones of all go into the seed.
    """
    if hashes:
        parent = hashes[-1]
    else:
        first = array("i", token_ids[:ahead]).tobytes()
        parent = blake2b(seed + first, digest_size=DIGEST_BYTES, person=b"dovetail-seed").digest()
    for start in range(len(hashes) * block_size + ahead, num_blocks * block_size + ahead, block_size):
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
