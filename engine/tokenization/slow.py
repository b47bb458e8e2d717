"""Tokenizers that only Hugging Face transformers can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.engine.tokenization.directory import read_json
from dovetail.engine.tokenization.form import TokenizerForm
from dovetail.engine.tokenization.tokenizer import FastTokenizer, Tokenizer

_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
_SENTENCEPIECE_LIBRARIES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
"""Module -> the package that brings it."""


def load_with_transformers(
    directory: Path, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str], keep_class: bool
) -> Tokenizer:
    """Lets transformers read, and convert, the files in `directory`.

    What it can convert runs on the `tokenizers` library, unless `keep_class`. Code that lies beside the files is never
    run, and nobody is asked whether it may be. Raises `ModelError`.
    """
    try:
        # Without trust_remote_code=False transformers asks on standard input, and takes any "y" that it reads there.
        found = AutoTokenizer.from_pretrained(
            directory, use_fast=not keep_class, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # Each tokenizer class fails in its own way; the user needs to know which directory, and why.
        reason = _why_not(directory) or f"transformers cannot read it: {error}"
        raise ModelError(f"the tokenizer in {directory} cannot be used: {reason}") from error
    special = {**special_tokens, **{role: str(text) for role, text in found.special_tokens_map.items()}}
    if isinstance(found, PreTrainedTokenizerFast) and not keep_class:
        backend = found.backend_tokenizer
        return FastTokenizer(backend, backend.to_str(), special, chat_templates)
    return TransformersTokenizer(found, special, chat_templates, directory)


def _why_not(directory: Path) -> str | None:
    """What stands in the way of reading the tokenizer, where that is known."""
    if (code := _own_code(directory)) is not None:
        return (
            f"it asks for Python code of the checkpoint ({code}), which is never run; give model.tokenizer a directory "
            "with a tokenizer.json, or set model.tokenizer_mode to none and send token ids"
        )
    found = [name for name in _SENTENCEPIECE_FILES if (directory / name).exists()]
    lacking = [package for module, package in _SENTENCEPIECE_LIBRARIES.items() if not _is_installed(module)]
    if found and lacking:
        return (
            f"there is no tokenizer.json, and to read {found[0]} takes libraries that are not installed: "
            f"pip install {' '.join(lacking)}"
        )
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _own_code(directory: Path) -> str | None:
    """The class that tokenizer_config.json or config.json names for the tokenizer in code of its own."""
    for name in ("tokenizer_config.json", "config.json"):
        given = read_json(directory / name).get("auto_map")
        found = given.get("AutoTokenizer") if isinstance(given, Mapping) else given
        classes = [text for text in (found if isinstance(found, list) else [found]) if isinstance(text, str)]
        if classes:
            return classes[0]
    return None


class TransformersTokenizer(Tokenizer):
    """A tokenizer class of transformers, as it is."""

    def __init__(
        self, backend: Any, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str], directory: Path
    ):
        super().__init__(special_tokens, chat_templates)
        self._backend = backend
        self._directory = directory

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return len(self._backend)

    @property
    def tokenizer_json(self) -> str | None:
        """See `Tokenizer.tokenizer_json`."""
        return self._backend.backend_tokenizer.to_str() if isinstance(self._backend, PreTrainedTokenizerFast) else None

    @property
    def form(self) -> TokenizerForm:
        """See `Tokenizer.form`."""
        return TokenizerForm(
            special_tokens=self.special_tokens,
            chat_templates=self.chat_templates,
            directory=str(self._directory),
            mode="slow",
        )

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """See `Tokenizer.special_token_ids`."""
        return frozenset(self._backend.all_special_ids)

    @cached_property
    def added_token_ids(self) -> frozenset[int]:
        """See `Tokenizer.added_token_ids`."""
        return self.special_token_ids | frozenset(self._backend.get_added_vocab().values())

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
