"""Host pages of swapped blocks on a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from dovetail.contracts.errors import CapacityError
from dovetail.worker.pinned_pages import pinned_pages


class FakeRuntime:
    """CUDA's runtime, which notes the memory that it was told to pin."""

    def __init__(self, code: int = 0):
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_pages_are_pinned_without_rounding_until_they_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pages = pinned_pages(5, 3000)
    assert runtime.registered == {pages.data_ptr(): 15000}
    assert (pages.shape, int(pages.sum())) == ((5, 3000), 0)
    pages[4].fill_(7)
    view = pages[4:]
    del pages
    gc.collect()
    assert runtime.registered, "a view still holds the memory"
    assert int(view.sum()) == 7 * 3000
    del view
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(code=2))
    with pytest.raises(CapacityError, match=r"lower cache\.swap_gib"):
        pinned_pages(5, 3000)


def test_no_pages_pin_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("asked CUDA"))
    assert pinned_pages(0, 3000).shape == (0, 3000)
