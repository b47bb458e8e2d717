"""Blocks in files: they survive the engine, and engines that share a folder share them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv_connector import BlockStore, ConnectorSetup, KVConnector, StoreSetup
from dovetail.contracts.plugin import PluginOptions
from dovetail.plugins.kv_connectors.disk_folder import BlockFolder
from dovetail.plugins.kv_connectors.sizes import most_bytes


class DiskOptions(PluginOptions):
    """What a config may say besides the name."""

    path: Path
    """Folder of the files; it is made where it is not there. All ranks must see the same one."""
    size_gib: float = Field(default=16.0, gt=0)
    """Most that the folder's blocks take, over all ranks and engines, in GiB; and a sixteenth more for every engine
    that writes at the same time."""
    retry_seconds: float = Field(default=30.0, ge=0)
    """How long nothing is saved after the disk refused a file."""


class DiskStore(BlockStore):
    """The files of one rank."""

    def __init__(self, folder: BlockFolder, path: Path, retry_s: float):
        self._folder = folder
        self._path = path
        self._retry_s = retry_s
        self._refused_until = 0.0
        self._refusal = ""
        """Why; no exception, whose traceback would keep the record that was refused."""

    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        if time.monotonic() < self._refused_until:
            raise OSError(self._refusal)
        try:
            return self._folder.write(block_hash, record)
        except OSError as error:
            self._refused_until = time.monotonic() + self._retry_s
            self._refusal = f"nothing is saved in {self._path} for {self._retry_s:g} s: {error}"
            raise OSError(self._refusal) from error

    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | None:
        return self._folder.read(block_hash)

    def remove(self, block_hash: bytes) -> None:
        self._folder.remove(block_hash)

    def close(self) -> None:
        return None


class Disk(KVConnector):
    """Files in a folder, those that were used least recently removed first."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options = DiskOptions
    options: DiskOptions

    def __init__(self, options: PluginOptions, setup: ConnectorSetup):
        super().__init__(options, setup)
        namespace = self.options.path / setup.namespace.hex()
        self._ranks = [namespace / str(rank) for rank in range(setup.num_ranks)]

    @classmethod
    def open_store(cls, options: DiskOptions, setup: StoreSetup) -> BlockStore:
        size = most_bytes(options.size_gib, setup) * setup.num_ranks
        try:
            folder = BlockFolder(options.path, setup.namespace, setup.rank, setup.num_ranks, size)
        except OSError as error:
            raise ConfigError(
                f"kv_connector.path {str(options.path)!r} cannot be used ({error}): name a folder that this user may"
                " write to"
            ) from error
        return DiskStore(folder, options.path, options.retry_seconds)

    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        return next((i for i, one in enumerate(block_hashes) if not self._is_there(one)), len(block_hashes))

    def wants(self, block_hash: bytes) -> bool:
        return not self._is_there(block_hash)

    def saved(self, block_hashes: Sequence[bytes]) -> None:
        return None

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        return None

    def close(self) -> None:
        return None

    def _is_there(self, block_hash: bytes) -> bool:
        name = f"{block_hash.hex()}.kv"
        return all((folder / name).exists() for folder in self._ranks)
