"""Host pages that a GPU copies from and to, of exactly the size that is asked for."""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch

from dovetail.contracts.errors import CapacityError


def pinned_pages(num_blocks: int, page_bytes: int) -> torch.Tensor:
    """Returns zeroed uint8 [num_blocks, page_bytes] that is registered with CUDA until it is freed.

    torch's own pinned memory comes in powers of two, so that a swap pool could take twice what `cache.swap_gib` says.
    Raises `CapacityError` where the memory cannot be pinned.
    """
    size = num_blocks * page_bytes
    if not size:
        return torch.zeros(num_blocks, page_bytes, dtype=torch.uint8)
    # Whole pages, which is what the driver registers. A finalizer watches the array: a map is gone before its own run.
    array = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(array.ctypes.data, size, 0))
    if code:
        raise CapacityError(
            f"CUDA cannot pin {size / 2**30:.2f} GiB of host memory for swapped blocks (error {code}): lower "
            "cache.swap_gib, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(array, runtime.cudaHostUnregister, array.ctypes.data).atexit = False
    return torch.from_numpy(array).view(num_blocks, page_bytes)
