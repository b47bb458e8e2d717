"""A record is the pages of one block on one rank behind a header that says whose they are."""

from __future__ import annotations

from hashlib import blake2b

_MAGIC = b"dovetail-kv-1\0\0\0"
HEADER_BYTES = 32
"""16 bytes that say what a record is, and 16 of the checksum."""


class RecordSeal:
    """Writes and verifies the headers of one rank's records."""

    def __init__(self, namespace: bytes, rank: int, num_bytes: int):
        """`num_bytes`: of a record, header and all."""
        self._whose = blake2b(namespace + rank.to_bytes(4, "little"), digest_size=32).digest()
        self._num_bytes = num_bytes

    def put(self, block_hash: bytes, record: memoryview) -> None:
        """Fills in the header of a record whose pages are there."""
        record[:HEADER_BYTES] = _MAGIC + self._checksum(block_hash, record)

    def is_whole(self, block_hash: bytes, record: memoryview) -> bool:
        """Whether this is what was written for the block, by this rank of an engine with the same pages."""
        if record.nbytes != self._num_bytes or record[:16] != _MAGIC:
            return False
        return record[16:HEADER_BYTES] == self._checksum(block_hash, record)

    def _checksum(self, block_hash: bytes, record: memoryview) -> bytes:
        # Blake2b lets go of the interpreter's lock for buffers of this size.
        return blake2b(record[HEADER_BYTES:], digest_size=16, key=self._whose[:32] + block_hash[:32]).digest()
