"""Memory that this process has and does not need."""

from __future__ import annotations

import ctypes
import mmap
import sys


def give_back_free_memory() -> None:
    """Gives what the C library keeps of freed memory back to the system, where it is glibc. Loading frees much that
    nothing asks for again. Takes milliseconds."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    try:
        trim = libc.malloc_trim
    except AttributeError:  # musl
        return
    trim(ctypes.c_size_t(0))


def give_back_pages(address: int, num_bytes: int) -> int:
    """Gives the whole pages within host memory back to the system, on Linux; returns the bytes that were in memory. The
    addresses stay valid: a page that is touched again has zeros, or what a mapped file has there."""
    if sys.platform != "linux":
        return 0
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + num_bytes) // page * page
    if last <= first:
        return 0
    libc = ctypes.CDLL(None)
    in_memory = (ctypes.c_ubyte * ((last - first) // page))()
    start, length = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
    is_known = libc.mincore(start, length, in_memory) == 0
    if libc.madvise(start, length, ctypes.c_int(mmap.MADV_DONTNEED)) != 0:
        return 0
    return page * sum(each & 1 for each in in_memory) if is_known else last - first
