"""What a Hugging Face checkpoint's directory says about its tokenizer, beside the tokenizer itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ModelError


@dataclass(frozen=True)
class TokenizerSettings:
    """tokenizer_config.json and its neighbours.

    add_bos_token and add_eos_token are not read: where there is a tokenizer.json, its own rule is the one that counts
    (transformers 5 goes by that too).
    """

    special_tokens: dict[str, str] = field(default_factory=dict)
    """Role -> text, "bos_token" -> "<s>"."""
    extra_special: tuple[str, ...] = ()
    """Texts of special tokens without a role."""
    chat_templates: dict[str, str] = field(default_factory=dict)


def read_settings(directory: Path) -> TokenizerSettings:
    """Reads what is there. Raises `ModelError` for a file that is broken."""
    config = read_json(directory / "tokenizer_config.json")
    roles = {**read_json(directory / "special_tokens_map.json"), **config}
    special = {role: text for role, value in roles.items() if role.endswith("_token") and (text := _text(value))}
    extra = [*_listed(roles.get("additional_special_tokens")), *_listed(roles.get("extra_special_tokens"))]
    return TokenizerSettings(
        special_tokens=special,
        extra_special=tuple(text for value in extra if (text := _text(value))),
        chat_templates=_chat_templates(directory, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


def read_text(path: Path) -> str:
    """What a file of a checkpoint says. Raises `ModelError` for one that is no regular file, or not UTF-8."""
    if not path.is_file():
        raise ModelError(f"{path} is no regular file")  # a pipe would be waited for
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _text(value: Any) -> str | None:
    """A token is given as its text, or as an object with its text and flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _listed(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name; files beside the config win over the template inside it."""
    inside = config.get("chat_template") or read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(inside, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in inside if _is_named(entry)}
    else:
        templates = {"default": inside} if isinstance(inside, str) else {}
    main = directory / "chat_template.jinja"
    for path in (main, *sorted((directory / "additional_chat_templates").glob("*.jinja"))):
        if path.exists():
            templates["default" if path == main else path.stem] = read_text(path)
    return templates


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and {"name", "template"} <= entry.keys()
