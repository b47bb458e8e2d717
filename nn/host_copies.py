"""Copies of the host's arrays to a device, for which the host does not wait."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def on_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Returns `array` as a tensor on `device`, of its dtype and shape ([] becomes [1]); on a CPU it shares
    the memory of a contiguous array.

    A copy to a GPU out of ordinary memory has the host wait for all work before it. So the array goes through pinned
    memory of torch's cache, which torch reuses when the copy is done: the array itself may change at once.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
