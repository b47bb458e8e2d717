"""Files of blocks, where the disk takes none."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from dovetail.contracts.kv_connector import StoreSetup
from dovetail.plugins.kv_connectors.disk import Disk, DiskOptions


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
