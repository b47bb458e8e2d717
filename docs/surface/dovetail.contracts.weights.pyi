import torch
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin, PluginOptions
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class ModelFiles:
    reference: str
    path: Path
    revision: str | None = None


class ModelSource(Plugin):
    def __init__(self, options: PluginOptions): ...
    options: PluginOptions
    @classmethod
    def recognizes(cls, reference: str) -> bool: ...
    @abstractmethod
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles: ...


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, eq=False)
class PackedTensor:
    format: str
    blocks: torch.Tensor
    shape: tuple[int, int]
    block_size: int
    block_bytes: int
    unpack: Callable[[torch.Tensor], torch.Tensor]
    def __getitem__(self, index: slice | tuple[slice, slice]) -> PackedTensor: ...
    def on_blocks(self, columns: slice) -> bool: ...
    def dequantized(self) -> torch.Tensor: ...


class WeightReader:
    @abstractmethod
    def infos(self) -> Sequence[TensorInfo]: ...
    @abstractmethod
    def read(self, name: str) -> torch.Tensor: ...
    def read_packed(self, name: str) -> torch.Tensor | PackedTensor: ...
    def packed_formats(self) -> frozenset[str]: ...
    def files(self) -> Sequence[Path]: ...
    def close(self) -> None: ...
    def release(self, name: str) -> None: ...
    def tensors(
        self,
        packed: frozenset[str] = frozenset(),
    ) -> Iterator[tuple[str, torch.Tensor | PackedTensor]]: ...


@dataclass(frozen=True)
class TokenizerFiles:
    directory: Path | None = None
    tokenizer_json: str | None = None
    chat_template: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    add_bos_token: bool = False


class WeightFormat(Plugin):
    quantizations: ClassVar[frozenset[str]] = frozenset()
    def __init__(self, options: PluginOptions): ...
    options: PluginOptions
    @classmethod
    @abstractmethod
    def recognizes(cls, files: ModelFiles) -> bool: ...
    @abstractmethod
    def config(self, files: ModelFiles) -> Mapping[str, Any]: ...
    @abstractmethod
    def tokenizer(self, files: ModelFiles) -> TokenizerFiles | None: ...
    @abstractmethod
    def open(self, files: ModelFiles) -> WeightReader: ...
