"""What a step copies to a device goes through pinned memory (`on_device`), so that the host does not wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.contracts.kv import KVSpec
from dovetail.worker import kv_storage
from dovetail.worker.kv_layout import build_layout
from dovetail.worker.kv_storage import KVStorage

META = torch.device("meta")


class NoCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses copies between devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default), "a copy of ordinary memory"
        return func(*args, **(kwargs or {}))


def pinned(array: Any, device: torch.device) -> torch.Tensor:
    """Of `on_device` the result, without a copy."""
    return torch.empty(array.shape, dtype=torch.from_numpy(array.copy()).dtype, device=device)


def test_blocks_that_are_copied_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = KVStorage(build_layout([KVSpec(num_kv_heads=1, head_size=8, dtype="float32")], 4), 5, 0, META)
    monkeypatch.setattr(kv_storage, "on_device", pinned)
    with NoCopies():
        storage.copy([(1, 2), (3, 4)])
