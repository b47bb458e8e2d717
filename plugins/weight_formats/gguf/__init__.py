"""GGUF: one file with metadata, a tokenizer and (mostly quantized) tensors."""

from dovetail.plugins.weight_formats.gguf.format import GGUFFormat

__all__ = ["GGUFFormat"]
