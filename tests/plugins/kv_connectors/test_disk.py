"""Files of blocks, where the disk takes none and where several engines write."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from dovetail.contracts.kv_connector import StoreSetup
from dovetail.plugins.kv_connectors.disk import Disk, DiskOptions
from dovetail.plugins.kv_connectors.disk_folder import BlockFolder


def test_a_disk_that_refuses_keeps_no_record(tmp_path: Path) -> None:
    """What is refused is host memory of the engine, for as long as the disk is not asked again."""
    setup = StoreSetup(namespace=bytes(32), rank=0, num_ranks=1, record_bytes=4096)
    store = Disk.open_store(DiskOptions(path=tmp_path), setup)
    (own,) = tmp_path.glob("*/0")
    own.rmdir()
    gc.disable()
    try:
        for _ in range(2):  # refused by the disk, then without asking it
            pages = np.zeros(4096, dtype=np.uint8)
            gone = weakref.ref(pages)
            with pytest.raises(OSError, match=r"nothing is saved in .* for 30 s: .*No such file"):
                store.write(bytes(32), memoryview(pages))
            del pages
            assert gone() is None
    finally:
        gc.enable()


def test_engines_that_share_a_folder_share_its_size(tmp_path: Path) -> None:
    """Each writes less than the size; all of them stay within it, but for what each has not seen of the others."""
    engines = [BlockFolder(tmp_path, bytes(32), 0, 1, 64 * 1024) for _ in range(4)]
    largest = 0
    for index in range(60):
        for number, engine in enumerate(engines):
            engine.write(bytes([number, index]) + bytes(30), memoryview(bytes(1024)))
        largest = max(largest, sum(file.stat().st_size for file in tmp_path.rglob("*.kv")))
    assert 48 * 1024 < largest <= (64 + 4 * 4) * 1024
