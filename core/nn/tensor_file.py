"""Tensors in one safetensors file that is mapped into memory and knows whether it is whole.

A valid safetensors file with two additions: its metadata hold checksums, and tensors whose size is a multiple of 64
bytes come first, so that each of these begins at a multiple of 64 bytes in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from dovetail.contracts.errors import DovetailError

ALIGNMENT = 64
_SUM_BYTES = 2**20
_NO_HASH = "0" * 32
_MAX_HEADER = 100 * 2**20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class DamagedFileError(DovetailError):
    """The file is not what was once written: cut short, or changed."""


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the tensors; the header is small beside them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_tensors(file: BinaryIO, tensors: Mapping[str, torch.Tensor], label: str) -> None:
    """Writes dense tensors (of any device, copied to the CPU one at a time) and a `label`. Raises `OSError`, and
    `ValueError` for a dtype that safetensors does not have."""
    ordered = dict(sorted(tensors.items(), key=_place))
    header = _header(ordered, label, _NO_HASH)
    file.write(header)
    digest = hashlib.blake2b(digest_size=16)
    for tensor in ordered.values():
        data = _bytes_of(tensor)
        digest.update(_sums(data))
        file.write(data.numpy().data)
    file.seek(0)
    # The hash has a fixed length, so the header that holds it is as long as the one that could not yet.
    file.write(_signed(_header(ordered, label, digest.hexdigest())))
    file.seek(0, os.SEEK_END)


def read_tensors(path: Path, label: str) -> dict[str, torch.Tensor]:
    """The tensors as views of a private memory map: writing to them changes neither the file nor other processes.

    Raises `DamagedFileError` for a file whose length, header, contents or label are not those that were written, and
    `OSError`. Every byte is read once, at the speed of memory (or of the disk, where the file is not cached).
    """
    with path.open("rb") as file:
        header, start = _read_header(file)
        size = os.fstat(file.fileno()).st_size
        metadata = header.pop("__metadata__")
        if metadata["label"] != label:
            raise DamagedFileError(f"it is labelled {metadata['label']!r}, not {label!r}")
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != start + end:
            raise DamagedFileError(f"it has {size} bytes, not {start + end}")
        # Copy-on-write, because torch warns of arrays that cannot be written to.
        mapped = torch.from_numpy(np.memmap(file, mode="c"))[start:]
    views = {name: mapped[slice(*entry["data_offsets"])] for name, entry in header.items()}
    digest = hashlib.blake2b(digest_size=16)
    for view in views.values():
        digest.update(_sums(view))
    if digest.hexdigest() != metadata["contents"]:
        raise DamagedFileError("its contents changed")
    return {
        name: view.view(_DTYPES[header[name]["dtype"]]).reshape(header[name]["shape"]) for name, view in views.items()
    }


def _place(item: tuple[str, torch.Tensor]) -> tuple[bool, int, str]:
    """Large multiples first, then wide elements before narrow ones: so every tensor is aligned to its elements."""
    name, tensor = item
    is_ragged = tensor.numel() * tensor.element_size() % ALIGNMENT != 0
    return is_ragged, -tensor.element_size(), name


def _header(tensors: Mapping[str, torch.Tensor], label: str, contents: str) -> bytes:
    """Length and JSON, padded so that what follows is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"label": label, "contents": contents, "header": _NO_HASH}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise ValueError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be kept in a file")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _signed(header: bytes) -> bytes:
    """The header with its own hash, computed while zeros stand in the hash's place."""
    field = b'"header":"%s"'
    return header.replace(field % _NO_HASH.encode(), field % _hash(header).encode(), 1)


def _hash(header: bytes) -> str:
    return hashlib.blake2b(header, digest_size=16).hexdigest()


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header as it was written, and where the data begin."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > _MAX_HEADER:
        raise DamagedFileError("it does not begin with a header")
    text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        claimed = str(header["__metadata__"]["header"])
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedFileError(f"its header is not readable: {error}") from None
    if _hash(prefix + text.replace(claimed.encode(), _NO_HASH.encode(), 1)) != claimed:
        raise DamagedFileError("its header changed")
    return header, 8 + length


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n]; a view where the tensor is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _sums(data: torch.Tensor) -> bytes:
    """A checksum of uint8 [n] at the speed of memory: 64-bit words added up modulo 2^64 within each MiB, so that no
    change of less than two words of one MiB goes unseen; and the bytes that are left over."""
    whole, words = len(data) // _SUM_BYTES * _SUM_BYTES, len(data) // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()  # a view of another width needs an aligned start
    wide = data[:words].view(torch.int64)
    sums = wide[: whole // 8].view(-1, _SUM_BYTES // 8).sum(1)
    return b"".join(part.numpy().tobytes() for part in (sums, wide[whole // 8 :].sum(), data[words:]))
