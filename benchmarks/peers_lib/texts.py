"""Texts that are the same for every engine, as token ids of the model's own tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from dovetail.config.load import load_config
from dovetail.engine.resolving import resolve
from dovetail.engine.tokenization.load import load_tokenizer
from dovetail.registry.bootstrap import bootstrap

ROOT = Path(__file__).resolve().parents[2]


def token_ids(model: str, text: str) -> list[int]:
    """The whole text, without special tokens. Loads no weights."""
    config = resolve(load_config(None, keywords={"model": model}))
    plugins = bootstrap(config.components(), config.plugin_hash)
    tokenizer = load_tokenizer(plugins.create(config.weight_format).tokenizer(config.model.files), "auto")
    assert tokenizer is not None
    return list(tokenizer.encode(text, add_special_tokens=False))


def repository_text() -> str:
    """The license and the docs of this checkout."""
    return "\n\n".join(path.read_text() for path in [ROOT / "LICENSE", *sorted(ROOT.glob("docs/**/*.md"))])


def python_topics() -> str:
    """The language reference that `help()` prints: English prose in every installation of Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def digest(text: str) -> str:
    """Of a text, to tell whether two runs used the same."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_ids(ids: Sequence[int]) -> str:
    """Of token ids, likewise."""
    return digest(json.dumps(list(ids)))
