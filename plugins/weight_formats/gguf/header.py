"""The head of a GGUF file: metadata and the list of tensors.

Own code instead of `gguf.GGUFReader`, which makes one numpy view per array element and takes seconds for a
vocabulary of 50,000 tokens; this takes some ten milliseconds. Layout: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from dovetail.contracts.errors import ModelError
from dovetail.plugins.weight_formats.gguf.magic import MAGIC
from dovetail.plugins.weight_formats.gguf.texts import Texts

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorEntry:
    """Name, shape, type and offset of one tensor."""

    name: str
    """The file's own name, "blk.0.attn_q.weight"."""
    shape: tuple[int, ...]
    """Row-major: the reverse of the order in the file."""
    type: GGMLQuantizationType
    path: Path
    offset: int
    """Of the first byte, from the start of the file."""
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """What the head of a GGUF file says. Metadata arrays of numbers are numpy arrays, arrays of strings are `Texts`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]

    def number(self, key: str) -> Any:
        """A number, None if it is not given."""
        return self._get(key, "a number", int, float)

    def flag(self, key: str, default: bool) -> bool:
        """Reads a truth value."""
        value = self.metadata.get(key)
        return default if value is None else bool(self._get(key, "true or false", bool, int))

    def text(self, key: str) -> str | None:
        """A string, None if it is not given."""
        value: str | None = self._get(key, "a string", str)
        return value

    def numbers(self, key: str) -> np.ndarray | None:
        """An array of numbers, None if it is not given."""
        value: np.ndarray | None = self._get(key, "an array of numbers", np.ndarray)
        return value

    def texts(self, key: str) -> Texts | None:
        """An array of strings, None if it is not given."""
        value: Texts | None = self._get(key, "an array of strings", Texts)
        return value

    def _get(self, key: str, what: str, *types: type) -> Any:
        value = self.metadata.get(key)
        if value is None or isinstance(value, types):
            return value
        raise ModelError(f"{self.path} is malformed: {key} should be {what}, not {value!r:.40}")


def read_header(path: Path) -> Header:
    """Reads the head of `path` and checks that the file is as long as its tensors need.

    Raises `ModelError` for a file that is missing, foreign, truncated or malformed.
    """
    try:
        with path.open("rb") as file:
            start = file.read(24)
            _check_start(path, start)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _check_start(path: Path, start: bytes) -> None:
    if not start.startswith(MAGIC):
        raise ModelError(f"{path} is not a GGUF file: it starts with {start[:4]!r} instead of {MAGIC!r}")
    if len(start) < 24:
        raise ModelError(f"{path} is truncated: a GGUF header takes at least 24 bytes, the file has {len(start)}")
    (version,) = _U32.unpack_from(start, 4)
    if version not in _VERSIONS:
        (swapped,) = struct.unpack_from(">I", start, 4)
        kind = "is big-endian" if swapped in _VERSIONS else f"has GGUF version {version}"
        raise ModelError(f"{path} {kind}; versions 2 and 3 in little-endian are read: convert the model again")


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 8

    def header(self) -> Header:
        num_tensors = self.u64()
        num_values = self.u64()
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self.string()
            metadata[key] = self.value(self.u32())
        records = [self.tensor_record() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelError(f"{self.path} is malformed: general.alignment is {alignment!r:.40}")
        data_start = -(-self.position // alignment) * alignment
        return Header(self.path, metadata, tuple(self.entry(data_start, *record) for record in records))

    def need(self, num_bytes: int, what: str) -> int:
        """Moves over `num_bytes` and returns where they start."""
        start, end = self.position, self.position + num_bytes
        if end > self.size:
            raise ModelError(
                f"{self.path} is truncated or malformed: {what} at byte {start} needs {num_bytes} bytes up to byte "
                f"{end}, but the file has {self.size}; copy or download it again"
            )
        self.position = end
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.need(4, "a number in the header"))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.need(8, "a number in the header"))[0])

    def string(self) -> str:
        length = self.u64()
        start = self.need(length, "a string in the header")
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path} is malformed: the string at byte {start} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.u32(), self.u64())
        dtype = self.scalar_type(kind)
        value = np.frombuffer(self.data, dtype, 1, self.need(dtype.itemsize, "a metadata value"))[0]
        # The shortest decimal is what the converter was given: 1e-05, not 9.999999747378752e-06.
        return float(str(value)) if kind == _FLOAT32 else value.item()

    def array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return self.nested(count)
        dtype = self.scalar_type(kind)
        start = self.need(count * dtype.itemsize, f"a metadata array of {count} values")
        return np.frombuffer(self.data, dtype, count, start).copy()

    def nested(self, count: int) -> list[Any]:
        found = []
        for _ in range(count):
            kind, inner = self.u32(), self.u64()
            if kind == _ARRAY:
                raise ModelError(f"{self.path} is malformed: arrays of arrays of arrays at byte {self.position}")
            found.append(self.array(kind, inner))
        return found

    def strings(self, count: int) -> Texts:
        # Vocabularies come through here: a tight loop over local names, with one bounds check per string.
        data, size, unpack = self.data, self.size, _U64.unpack_from
        start = position = self.position
        ends = array("Q")
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
                if position > size:
                    break
                ends.append(position - start)
        except struct.error as error:
            raise ModelError(f"{self.path} is truncated or malformed: text at byte {position}: {error}") from error
        if len(ends) < count:
            raise ModelError(
                f"{self.path} is truncated or malformed: an array of {count} strings ends after {len(ends)} with "
                f"the file's {size} bytes; copy or download it again"
            )
        self.position = position
        return Texts(self.path, data[start:position], ends)

    def scalar_type(self, kind: int) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} is malformed: metadata type {kind} at byte {self.position} is unknown")
        return _SCALARS[kind]

    def tensor_record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.u32()
        if num_dimensions > _MAX_DIMENSIONS:
            raise ModelError(f"{self.path} is malformed: tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self.u64() for _ in range(num_dimensions))
        if 0 in shape:
            raise ModelError(f"{self.path} is malformed: tensor {name!r} has no elements")
        return name, shape[::-1], self.u32(), self.u64()

    def entry(self, data_start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name!r} has type {kind}, which this version cannot read") from error
        block, block_bytes = GGML_QUANT_SIZES[type_]
        row = shape[-1] if shape else 1
        if row % block:
            raise ModelError(f"{self.path} is malformed: rows of {name!r} ({row}) are no multiple of {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        end = data_start + offset + num_bytes
        if end > self.size:
            raise ModelError(
                f"{self.path} is truncated: the data of tensor {name!r} should end at byte {end}, "
                f"but the file has {self.size} bytes; copy or download it again"
            )
        return TensorEntry(name, shape, type_, self.path, data_start + offset, num_bytes)
