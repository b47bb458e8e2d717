"""The rules about the files of sentence-transformers, which say how a model was trained to embed texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")
_KEY = "max_seq_length"


def trained_length(path: Path) -> tuple[int, str] | None:
    """Most tokens of the texts that a model was trained to embed, and the file that says so; None where none does."""
    for name in _FILES if path.is_dir() else ():
        config = read_json(path / name)
        length = config.get(_KEY) if isinstance(config, dict) else None
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            return length, name
    return None


def read_json(path: Path) -> Any:
    """None where it is not there or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
