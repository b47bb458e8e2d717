"""Files of blocks in one folder that several engines, and several lives of one engine, may share.

    FOLDER/<namespace>/<rank>/<block hash>.kv        hexadecimal, the rank in decimal

A file is written under another name and renamed, so that whoever opens it finds all of it. What has another name is
nobody's here: it is neither counted nor removed, but for unfinished files that are older than an hour.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_BLOCK = re.compile(r"[0-9a-f]{64}\.kv")
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_RANK = re.compile(r"[0-9]{1,5}")
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.kv\.[0-9]+-[0-9]+\.part")
_STALE_S = 3600.0
_KEPT = 0.9
"""Share of the size that is left when files are removed, so that this is rare."""
_UNSEEN = 1 / 16
"""Share of the size that an engine writes at most before it looks what others have written."""


class BlockFolder:
    """The blocks of one rank and namespace, in a folder whose files take at most so many bytes in all,
    and a sixteenth more for every engine that writes to it at the same time."""

    def __init__(self, folder: Path, namespace: bytes, rank: int, num_ranks: int, most_bytes: int):
        """Makes the folder where it is not there. Raises `OSError`."""
        self._folder = folder
        self._own = folder / namespace.hex() / str(rank)
        self._own.mkdir(parents=True, exist_ok=True)
        self._num_ranks = num_ranks
        self._most = most_bytes
        self._num_written = 0
        self._remove_unfinished()
        self._bytes = sum(size for _, size, _ in self._files())
        self._unseen = 0
        """Bytes that this engine wrote since it looked."""

    def path(self, block_hash: bytes) -> Path:
        """Where a block is, or would be."""
        return self._own / f"{block_hash.hex()}.kv"

    def write(self, block_hash: bytes, record: memoryview) -> list[bytes]:
        """Writes a file as a whole, or none. Returns blocks of this rank that were removed. Raises `OSError`."""
        path = self.path(block_hash)
        if path.exists():
            with suppress(OSError):
                os.utime(path)
            return []
        if record.nbytes * self._num_ranks > self._most:
            return [block_hash]
        removed = self._make_way(record.nbytes)
        self._num_written += 1
        part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident() % 10**6}{self._num_written}.part")
        try:
            part.write_bytes(record)
            part.rename(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        # Other ranks write as much.
        self._bytes += record.nbytes * self._num_ranks
        self._unseen += record.nbytes * self._num_ranks
        return removed

    def read(self, block_hash: bytes) -> bytes | None:
        """The content of a file, which counts as used. Raises `OSError`."""
        path = self.path(block_hash)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        with suppress(OSError):
            os.utime(path)
        return content

    def remove(self, block_hash: bytes) -> None:
        """Removes a file; it may be gone."""
        with suppress(OSError):
            self.path(block_hash).unlink()

    def _make_way(self, num_bytes: int) -> list[bytes]:
        """Removes the files that were used least recently, of all ranks and namespaces, where these are too many."""
        more = num_bytes * self._num_ranks
        if self._bytes + more <= self._most and self._unseen + more <= self._most * _UNSEEN:
            return []
        files = sorted(self._files())
        self._bytes, self._unseen = sum(size for _, size, _ in files), 0  # others write and remove too
        if self._bytes + more <= self._most:
            return []
        removed: list[bytes] = []
        for _, size, path in files:
            if self._bytes + more <= self._most * _KEPT:
                break
            with suppress(OSError):
                path.unlink()
            self._bytes -= size
            if path.parent == self._own:
                removed.append(bytes.fromhex(path.stem))
        return removed

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Time of last use, size and path of the blocks of all ranks and namespaces."""
        for directory in self._directories():
            for entry in _entries(directory):
                if _BLOCK.fullmatch(entry.name):
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_size, Path(entry.path)

    def _remove_unfinished(self) -> None:
        """Files of processes that died while they wrote."""
        before = time.time() - _STALE_S
        for directory in self._directories():
            for entry in _entries(directory):
                if _UNFINISHED.fullmatch(entry.name):
                    with suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_mtime < before:
                            os.unlink(entry.path)

    def _directories(self) -> Iterator[str]:
        for namespace in _entries(self._folder):
            if _NAMESPACE.fullmatch(namespace.name):
                yield from (rank.path for rank in _entries(namespace.path) if _RANK.fullmatch(rank.name))


def _entries(directory: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError:
        return []
