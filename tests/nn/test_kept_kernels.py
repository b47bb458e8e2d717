"""Kernels whose weights cannot be kept are loaded at every start; kernels that multiply nothing are none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dovetail.contracts.quantization import LinearKernel, LinearShape
from dovetail.nn import TorchLinear
from dovetail.nn.native.kept_kernels import KernelKeeper
from dovetail.nn.packed_cache import PackedCache


class OnlyPacked(TorchLinear):
    def packed(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}


@pytest.mark.parametrize("kind", [TorchLinear, OnlyPacked])
def test_a_kernel_without_both_ways_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[TorchLinear]
) -> None:
    keeper = KernelKeeper(PackedCache(tmp_path / "cache", 1 << 20), ["test"], (0, 1), lambda _: 4.0)
    keeper.wrap(LinearShape("layer", 4, 2, has_bias=False), kind(torch.zeros(2, 4)))
    weights = tmp_path / "weights"
    weights.write_bytes(b"checkpoint")
    with caplog.at_level(logging.DEBUG, "dovetail.nn.native.kept_kernels"):
        assert keeper.restore([weights]) is None
    assert not keeper.is_restored
    assert f"{kind.__name__} lacks packed or restore" in caplog.text


def test_a_kernel_must_load_and_multiply() -> None:
    class Silent(LinearKernel):
        def load(self, rows: slice, weight: object) -> None:
            raise NotImplementedError

    with pytest.raises(TypeError, match="apply"):
        Silent()  # type: ignore[abstract]
