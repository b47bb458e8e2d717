"""What a checkpoint says about its conversations, read without building the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import TokenizerFiles
from dovetail.engine.tokenization.directory import read_json, read_settings


@dataclass(frozen=True)
class ChatSigns:
    """Signs by which dialects recognize a model."""

    chat_template: str | None = None
    """Source of the template for conversations with tools, where the model has one of its own, else of the default."""
    added_tokens: frozenset[str] = frozenset()
    """Texts."""


def read_signs(files: TokenizerFiles) -> ChatSigns:
    """Raises `ModelError` for files that are broken."""
    if files.tokenizer_json is not None:
        return ChatSigns(files.chat_template, _added(_parse(files.tokenizer_json)))
    if files.directory is None:
        return ChatSigns(files.chat_template)
    templates = read_settings(files.directory).chat_templates
    own = templates.get("tool_use", templates.get("default"))
    return ChatSigns(files.chat_template or own, _added_of_directory(files.directory))


def _added_of_directory(directory: Path) -> frozenset[str]:
    """The small files first: tokenizer.json has megabytes."""
    listed = read_json(directory / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(listed, Mapping) and listed:
        return _texts(listed.values(), "content")
    if (directory / "tokenizer.json").exists():
        return _added(read_json(directory / "tokenizer.json"))
    return _texts(read_json(directory / "tekken.json").get("special_tokens") or (), "token_str")


def _added(tokenizer: Mapping[str, Any]) -> frozenset[str]:
    return _texts(tokenizer.get("added_tokens") or (), "content")


def _texts(tokens: Iterable[Any], key: str) -> frozenset[str]:
    return frozenset(str(token[key]) for token in tokens if isinstance(token, Mapping) and key in token)


def _parse(source: str) -> dict[str, Any]:
    try:
        found = json.loads(source)
    except ValueError as error:
        raise ModelError(f"the tokenizer in the model's metadata is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}
