"""Tokenizers that only Hugging Face transformers can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.tokenization.tokenizer import FastTokenizer, Tokenizer


def load_with_transformers(
    directory: Path, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str], keep_class: bool
) -> Tokenizer:
    """Lets transformers read, and convert, the files in `directory`.

    What it can convert runs on the `tokenizers` library, unless `keep_class`. Raises `ModelError`.
    """
    try:
        found = AutoTokenizer.from_pretrained(directory, use_fast=not keep_class)
    except Exception as error:
        # Each tokenizer class fails in its own way; the user needs to know which directory, and why.
        raise ModelError(f"transformers cannot read the tokenizer in {directory}: {error}") from error
    special = {**special_tokens, **{role: str(text) for role, text in found.special_tokens_map.items()}}
    if isinstance(found, PreTrainedTokenizerFast) and not keep_class:
        backend = found.backend_tokenizer
        return FastTokenizer(backend, backend.to_str(), special, chat_templates)
    return TransformersTokenizer(found, special, chat_templates)


class TransformersTokenizer(Tokenizer):
    """A tokenizer class of transformers, as it is."""

    def __init__(self, backend: Any, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]):
        super().__init__(special_tokens, chat_templates)
        self._backend = backend

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return len(self._backend)

    @property
    def tokenizer_json(self) -> str | None:
        """See `Tokenizer.tokenizer_json`."""
        return self._backend.backend_tokenizer.to_str() if isinstance(self._backend, PreTrainedTokenizerFast) else None

    @property
    def special_token_ids(self) -> frozenset[int]:
        """See `Tokenizer.special_token_ids`."""
        return frozenset(self._backend.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens))
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text cannot be tokenized, it is not valid Unicode: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer.token_to_id`."""
        found: int | None = self._backend.get_vocab().get(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """See `Tokenizer.id_to_token`."""
        found: str | None = self._backend.convert_ids_to_tokens(token_id)
        return found
