"""The GGUF weight format: one file, or a model split over several.

Every start asks this format whether it recognizes the model, and few models are in it: so what reads a file is imported
where a file is read. The library gguf takes its time where mistral_common is installed, which it imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.contracts.weights import ModelFiles, TokenizerFiles, WeightFormat, WeightReader
from dovetail.plugins.weight_formats.gguf.magic import MAGIC


class GGUFFormat(WeightFormat):
    """A ``.gguf`` file, or a directory with one model in that form. Tensors are dequantized when they are read, or
    come in their blocks where the caller can hold these."""

    contract = (1, 0)

    @classmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        """A name in .gguf, the magic bytes, or a directory with .gguf files and no safetensors."""
        path = files.path
        try:
            if path.is_dir():
                return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
            if path.suffix == ".gguf":
                return True
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        """See `WeightFormat.config`. "dtype" is given only where the matrices are not packed."""
        from dovetail.plugins.weight_formats.gguf.config import build_config
        from dovetail.plugins.weight_formats.gguf.parts import model_header

        return build_config(model_header(files.path))

    def tokenizer(self, files: ModelFiles) -> TokenizerFiles | None:
        """See `WeightFormat.tokenizer`. Raises `ModelError` for a tokenizer whose ids could not be reproduced."""
        from dovetail.plugins.weight_formats.gguf.parts import model_header
        from dovetail.plugins.weight_formats.gguf.vocabulary import build_tokenizer

        return build_tokenizer(model_header(files.path))

    def open(self, files: ModelFiles) -> WeightReader:
        from dovetail.plugins.weight_formats.gguf.config import architecture_of, build_config
        from dovetail.plugins.weight_formats.gguf.names import map_tensors
        from dovetail.plugins.weight_formats.gguf.parts import model_header
        from dovetail.plugins.weight_formats.gguf.reader import GGUFReader

        header = model_header(files.path)
        config = build_config(header)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        return GGUFReader(map_tensors(header, architecture_of(header), heads, kv_heads))
