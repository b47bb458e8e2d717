"""Arrays that `plan` fills on the host and kernels read on the device, at addresses that never change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.uint8): torch.uint8}


@dataclass(frozen=True)
class Arrays:
    """Device arrays of one launch, as kernels.py describes them."""

    tokens: torch.Tensor
    table: torch.Tensor
    tree: torch.Tensor
    items: torch.Tensor
    visits: torch.Tensor
    blocks: torch.Tensor
    partials: torch.Tensor
    sums: torch.Tensor
    members: torch.Tensor


class StepArrays:
    """Named arrays, each twice in pinned host memory and once on the device.

    Host copies take turns, so that a plan can be made while the device still copies the one before.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._host: dict[str, list[torch.Tensor]] = {}
        self._views: dict[str, list[np.ndarray]] = {}
        self.device: dict[str, torch.Tensor] = {}
        """The arrays that kernels read."""
        self._turn = 0
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def add(self, name: str, shape: tuple[int, ...], dtype: type[np.generic] = np.int32) -> None:
        """Adds an array of zeros to the buffer."""
        torch_dtype = _DTYPES[np.dtype(dtype)]
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            host = [torch.zeros(shape, dtype=torch_dtype, pin_memory=self._is_cuda) for _ in range(2)]
            self.device[name] = torch.zeros(shape, dtype=torch_dtype, device=self._device)
        self._host[name] = host
        self._views[name] = [tensor.numpy() for tensor in host]

    def begin(self) -> None:
        """Takes the other host copies. Waits until the device has read what they held two steps ago."""
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()

    def host(self, name: str) -> np.ndarray:
        """The host copy to fill."""
        return self._views[name][self._turn]

    def send(self, name: str, count: int) -> None:
        """Copies the first `count` rows to the device, in the order of the current stream."""
        if count:
            self.device[name][:count].copy_(self._host[name][self._turn][:count], non_blocking=True)

    def end(self) -> None:
        """Marks all copies of this turn as sent."""
        if self._is_cuda:
            event = self._copied[self._turn] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event
