"""What the suite of weight formats finds: each a change in a format that passes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weights import (
    ModelFiles,
    PackedTensor,
    TensorInfo,
    TokenizerFiles,
    WeightFormat,
    WeightReader,
)
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.format_suite import SavedCheckpoint, WeightFormatSuite

MAGIC = b"FLAT"
BLOCK, BLOCK_BYTES = 32, 36
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Blocks of 32: a float32 scale, and int8."""
    blocks = tensor.reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    rounded = (blocks / scales).round().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), rounded.view(torch.uint8)], dim=1).reshape(tensor.shape[0], -1)


def unpack(blocks: torch.Tensor) -> torch.Tensor:
    each = blocks.reshape(-1, BLOCK_BYTES)
    scales = each[:, :4].contiguous().view(torch.float32)
    return (each[:, 4:].view(torch.int8).float() * scales).reshape(blocks.shape[0], -1)


def write(path: Path, tensors: Mapping[str, torch.Tensor], packed: Sequence[str]) -> None:
    stored = {name: pack(tensor) if name in packed else tensor for name, tensor in tensors.items()}
    listed, start = {}, 0
    for name, tensor in stored.items():
        dtype = "P8" if name in packed else str(tensors[name].dtype).removeprefix("torch.")
        listed[name] = {"dtype": dtype, "shape": list(tensors[name].shape), "start": start, "size": tensor.nbytes}
        start += tensor.nbytes
    header = json.dumps({"config": CONFIG, "tensors": listed}).encode()
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in stored.values())
    path.write_bytes(MAGIC + struct.pack("<Q", len(header)) + header + data)


class FlatReader(WeightReader):
    """Reads the whole file at once."""

    def __init__(self, path: Path):
        self.path = path
        self.header, start = read_header(path)
        self.data = torch.frombuffer(bytearray(path.read_bytes()[start:]), dtype=torch.uint8)
        size = sum(entry["size"] for entry in self.header["tensors"].values())
        if len(self.data) != size:
            raise ModelError(f"{path} is truncated: {len(self.data)} bytes of weights of {size}")

    def entry(self, name: str) -> dict[str, Any]:
        if name not in self.header["tensors"]:
            raise ModelError(f"{self.path} has no tensor {name!r}")
        entry: dict[str, Any] = self.header["tensors"][name]
        return entry

    def infos(self) -> Sequence[TensorInfo]:
        entries = self.header["tensors"].items()
        return [TensorInfo(name, tuple(entry["shape"]), entry["dtype"], entry["size"]) for name, entry in entries]

    def stored(self, name: str) -> torch.Tensor:
        entry = self.entry(name)
        return self.data[entry["start"] : entry["start"] + entry["size"]]

    def read(self, name: str) -> torch.Tensor:
        entry = self.entry(name)
        if entry["dtype"] == "P8":
            return unpack(self.stored(name).reshape(entry["shape"][0], -1))
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        return self.stored(name).view(dtype).reshape(entry["shape"])

    def read_packed(self, name: str) -> torch.Tensor | PackedTensor:
        entry = self.entry(name)
        if entry["dtype"] != "P8":
            return self.read(name)
        rows, columns = entry["shape"]
        return PackedTensor("P8", self.stored(name).reshape(rows, -1), (rows, columns), BLOCK, BLOCK_BYTES, unpack)

    def packed_formats(self) -> frozenset[str]:
        return frozenset(info.dtype for info in self.infos()) & {"P8"}

    def files(self) -> Sequence[Path]:
        return [self.path]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        with path.open("rb") as file:
            magic, size = file.read(4), file.read(8)
            if magic != MAGIC or len(size) != 8:
                raise ModelError(f"{path} is no flat checkpoint, or is cut off in its header")
            length = struct.unpack("<Q", size)[0]
            return json.loads(file.read(length)), 12 + length
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


class Flat(WeightFormat):
    """Weights in one file behind a header."""

    contract = (1, 0)
    reader_class: ClassVar[type[FlatReader]] = FlatReader

    @classmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        try:
            with files.path.open("rb") as file:
                return file.read(4) == MAGIC
        except OSError:
            return False

    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        return {**read_header(files.path)[0]["config"], "generation_config": {}}

    def tokenizer(self, files: ModelFiles) -> TokenizerFiles | None:
        return None

    def open(self, files: ModelFiles) -> WeightReader:
        return self.reader_class(files.path)


class FlatSuite(WeightFormatSuite):
    plugin = Flat

    @pytest.fixture
    def saved(self, tmp_path: Path) -> SavedCheckpoint:
        (tmp_path / "model").mkdir()
        path = tmp_path / "model" / "weights.flat"
        packed = torch.randn(8, 64)
        tensors = {
            "norm.weight": torch.randn(64),
            "up.weight": packed,
            "head.weight": torch.randn(16, 64).bfloat16(),
        }
        write(path, tensors, ["up.weight"])
        return SavedCheckpoint(path, config=CONFIG, tensors=tensors | {"up.weight": unpack(pack(packed))})


class TestFlat(FlatSuite):
    pass


def reads(reader: type[FlatReader]) -> type[Flat]:
    """The format with another reader."""
    return type(reader.__name__, (Flat,), {"reader_class": reader, "__module__": __name__})


class ByName(Flat):
    @classmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        return files.path.suffix in (".flat", ".bin")


class RaisesForFolders(Flat):
    @classmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        with files.path.open("rb") as file:
            return file.read(4) == MAGIC


class RaisesItsOwn(Flat):
    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        data = files.path.read_bytes()
        return {**json.loads(data[12 : 12 + struct.unpack("<Q", data[4:12])[0]])["config"], "generation_config": {}}


class NoGenerationConfig(Flat):
    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        return read_header(files.path)[0]["config"]  # type: ignore[no-any-return]


class OneConfigForAll(Flat):
    kept: dict[str, Any]

    def __init__(self, options: PluginOptions):
        super().__init__(options)
        self.kept = {}

    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        self.kept = self.kept or dict(super().config(files))
        return dict(self.kept)


class TakesWhatIsThere(FlatReader):
    def __init__(self, path: Path):
        self.path = path
        self.header, start = read_header(path)
        size = sum(entry["size"] for entry in self.header["tensors"].values())
        data = path.read_bytes()[start:]
        self.data = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


class CountsWeights(FlatReader):
    def infos(self) -> Sequence[TensorInfo]:
        return [
            TensorInfo(info.name, info.shape, info.dtype, torch.Size(info.shape).numel()) for info in super().infos()
        ]


class StoredShapes(FlatReader):
    def infos(self) -> Sequence[TensorInfo]:
        packed = {"P8": 36 / 32}
        return [
            TensorInfo(
                info.name,
                (*info.shape[:-1], int(info.shape[-1] * packed.get(info.dtype, 1))),
                info.dtype,
                info.num_bytes,
            )
            for info in super().infos()
        ]


class ReadsHalves(FlatReader):
    def read(self, name: str) -> torch.Tensor:
        return super().read(name).half()


class ReadsNext(FlatReader):
    """Goes on from where it was, whatever it is asked for."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.position = 0

    def stored(self, name: str) -> torch.Tensor:
        size = self.entry(name)["size"]
        found = self.data[self.position :][:size]
        self.position = (self.position + size) % len(self.data)
        return found if len(found) == size else self.data[:size]


class OneBuffer(FlatReader):
    """Reads every tensor into the same memory."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.buffer = torch.empty(1 << 12, dtype=torch.uint8)

    def stored(self, name: str) -> torch.Tensor:
        found = super().stored(name)
        return self.buffer[: len(found)].copy_(found)


class ReleasesWhatIsHeld(FlatReader):
    def release(self, name: str) -> None:
        self.stored(name).zero_()


class ClosesWhatIsHeld(FlatReader):
    def close(self) -> None:
        self.data.zero_()


class ClosesOnce(FlatReader):
    def close(self) -> None:
        del self.data


class BareKeyError(FlatReader):
    def entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = self.header["tensors"][name]
        return entry


class WrongFormat(FlatReader):
    def packed_formats(self) -> frozenset[str]:
        return frozenset({"Q8_0"})


class PacksAlways(FlatReader):
    def tensors(self, packed: frozenset[str] = frozenset()) -> Iterator[tuple[str, torch.Tensor | PackedTensor]]:
        for info in self.infos():
            yield info.name, self.read_packed(info.name)


class CutsRowsWrongly(FlatReader):
    """Blocks lie column by column."""

    def read_packed(self, name: str) -> torch.Tensor | PackedTensor:
        packed = super().read_packed(name)
        if not isinstance(packed, PackedTensor):
            return packed
        rows, columns = packed.shape
        whole = packed.blocks

        def unpack_all(blocks: torch.Tensor) -> torch.Tensor:
            return unpack(whole)[: blocks.shape[0], : blocks.shape[1] // BLOCK_BYTES * BLOCK]

        return PackedTensor("P8", whole, (rows, columns), BLOCK, BLOCK_BYTES, unpack_all)


class MarksAsRead(FlatReader):
    def __init__(self, path: Path):
        super().__init__(path)
        path.with_suffix(".read").touch()
        path.touch()


FAULTS = [
    Fault("goes by the suffix", ByName, "test_does_not_recognize_others"),
    Fault("raises for folders", RaisesForFolders, "test_does_not_recognize_what_is_not_there"),
    Fault("raises errors of its own", RaisesItsOwn, "test_refuses_others"),
    Fault("has no generation config", NoGenerationConfig, "test_gives_the_config"),
    Fault("gives all callers one config", OneConfigForAll, "test_gives_each_caller_a_config_of_his_own"),
    Fault("fills what is cut off with zeros", reads(TakesWhatIsThere), "test_refuses_what_is_cut_off"),
    Fault("counts weights for bytes", reads(CountsWeights), "test_counts_stored_bytes"),
    Fault("gives the stored shape", reads(StoredShapes), "test_knows_every_tensor_before_it_reads"),
    Fault("reads another dtype", reads(ReadsHalves), "test_reads_every_tensor"),
    Fault("reads in the file's order", reads(ReadsNext), "test_reads_in_any_order"),
    Fault("reads into one buffer", reads(OneBuffer), "test_yields_all_in_order"),
    Fault("releases what is held", reads(ReleasesWhatIsHeld), "test_released_tensors_keep_their_values"),
    Fault("takes back what it gave", reads(ClosesWhatIsHeld), "test_tensors_outlive_the_reader"),
    Fault("closes once", reads(ClosesOnce), "test_tensors_outlive_the_reader"),
    Fault("raises for unknown names", reads(BareKeyError), "test_refuses_unknown_names"),
    Fault("names other packed formats", reads(WrongFormat), "test_packed_tensors_encode_the_same"),
    Fault("cuts other rows", reads(CutsRowsWrongly), "test_packed_tensors_encode_the_same"),
    Fault("packs unasked", reads(PacksAlways), "test_packs_only_what_the_caller_holds"),
    Fault("writes next to the weights", reads(MarksAsRead), "test_leaves_the_files_alone"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_format_that(fault: Fault) -> None:
    check_fault(fault, FlatSuite, plugin=fault.plugin)
