"""The rules about the files of sentence-transformers, which say how a model was trained to embed texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
_KEY = "max_seq_length"
_MODULES, _POOLING = "modules.json", "pooling_mode_"


def trained_length(path: Path) -> tuple[int, str] | None:
    """Most tokens of the texts that a model was trained to embed, and the file that says so; None where none does."""
    for name in _FILES if path.is_dir() else ():
        config = read_json(path / name)
        length = config.get(_KEY) if isinstance(config, dict) else None
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            return length, name
    return None


def stored_mode(path: Path) -> str | None:
    """How the files of sentence-transformers say that states are pooled ("mean", "cls", "lasttoken", ...): modules.json
    names the folder of a pooling module, whose config has one `pooling_mode_...` that is true. None where they say
    nothing; several modes, whose vectors would be joined, are one name that no pooler has."""
    for module in _modules(path) or ():
        if not str(module.get("type", "")).endswith("Pooling"):
            continue
        config = read_json(path / str(module.get("path", "")) / "config.json")
        if isinstance(config, dict):
            return _mode_of(config)
    return None


def _mode_of(config: dict[str, Any]) -> str | None:
    named = config.get("pooling_mode")
    if isinstance(named, str):
        return named
    chosen = [key.removeprefix(_POOLING) for key, value in config.items() if key.startswith(_POOLING) and value is True]
    modes = [mode.removesuffix("_tokens").removesuffix("_token") for mode in chosen]
    return "+".join(modes) or None


def stored_normalize(path: Path) -> bool | None:
    """Whether modules.json has a module that divides vectors by their length; None where there is no such file."""
    modules = _modules(path)
    return None if modules is None else any(str(one.get("type", "")).endswith("Normalize") for one in modules)


def other_modules(path: Path) -> list[str]:
    """Names of the modules in modules.json besides the model, pooling and normalization: vectors go through them too
    (Dense, say)."""
    names = [str(one.get("type", "")).rpartition(".")[2] for one in _modules(path) or ()]
    return [name for name in names if name not in ("Transformer", "Pooling", "Normalize")]


def _modules(path: Path) -> list[dict[str, Any]] | None:
    """Entries of modules.json; None where there is no such file, or no list in it."""
    modules = read_json(path / _MODULES) if path.is_dir() else None
    return [one for one in modules if isinstance(one, dict)] if isinstance(modules, list) else None


def read_json(path: Path) -> Any:
    """None where it is not there or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
