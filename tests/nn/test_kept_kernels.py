"""Kernels whose weights cannot be kept are loaded at every start; kernels that multiply nothing are none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dovetail.contracts.quantization import KeepsPacked, LinearKernel, LinearShape
from dovetail.nn import TorchLinear
from dovetail.nn.native.kept_kernels import KernelKeeper
from dovetail.nn.packed_cache import PackedCache


def test_a_kernel_that_cannot_be_kept_is_used_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeper = KernelKeeper(PackedCache(tmp_path / "cache", 1 << 20), ["test"], (0, 1), lambda _: 4.0)
    kernel = TorchLinear(torch.zeros(2, 4))
    assert keeper.wrap(LinearShape("layer", 4, 2, has_bias=False), kernel) is kernel
    weights = tmp_path / "weights"
    weights.write_bytes(b"checkpoint")
    with caplog.at_level(logging.DEBUG, "dovetail.nn.native.kept_kernels"):
        assert keeper.restore([weights]) is None
    assert not keeper.is_restored
    assert "TorchLinear is no KeepsPacked" in caplog.text


def test_a_kernel_that_cannot_be_restored_is_none_to_keep() -> None:
    class OnlyPacked(KeepsPacked):
        def load(self, rows: slice, weight: object) -> None:
            raise NotImplementedError

        def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            raise NotImplementedError

        def packed(self) -> dict[str, torch.Tensor]:
            return {}

    with pytest.raises(TypeError, match=r"layout.*restore"):
        OnlyPacked()  # type: ignore[abstract]


def test_a_kernel_must_load_and_multiply() -> None:
    class Silent(LinearKernel):
        def load(self, rows: slice, weight: object) -> None:
            raise NotImplementedError

    with pytest.raises(TypeError, match="apply"):
        Silent()  # type: ignore[abstract]
