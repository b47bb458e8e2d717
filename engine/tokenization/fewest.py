"""How few tokens a text can have: a lower bound from its bytes, so that what is far too long is not tokenized.

Each token stands for so many bytes of the text at most. That holds where nothing of a text is dropped on its way to
the tokens: BPE with a token for every byte, and steps before it that only split, or replace by something as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.engine.tokenization.pieces import BYTE_OF_CHAR

NFC_SHRINKS = 9
"""Most bytes of a text for a byte of its NFC: decomposing shortens a character to a third at most (U+212A becomes K),
and composing shortens what comes of it to a third (three jamo are one syllable)."""
_BYTE_CHARS = 256
_SPLITS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})


@dataclass(frozen=True, slots=True)
class FewestTokens:
    """The bound of one tokenizer."""

    longest: int
    """Bytes of the longest token."""
    is_composed: bool
    """Whether texts are brought into NFC first."""

    def of(self, text: str) -> int:
        """No tokenization of `text` has fewer tokens."""
        if text.isascii():
            return len(text) // self.longest
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
        return num_bytes // (self.longest * NFC_SHRINKS if self.is_composed else self.longest)


def fewest_tokens(tokenizer_json: str) -> FewestTokens | None:
    """The bound of a tokenizer in the `tokenizers` library's JSON form; None where a text may lose something."""
    form = json.loads(tokenizer_json)
    model, added = form["model"], form["added_tokens"]
    normalizers = list(_steps(form.get("normalizer"), "normalizers"))
    splits = list(_steps(form.get("pre_tokenizer"), "pretokenizers"))
    keeps = (
        model["type"] == "BPE"
        and not any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
        and all(map(_keeps_length, normalizers))
        and all(step["type"] in _SPLITS and step.get("behavior") != "Removed" for step in splits)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
        and _has_all_bytes(model, splits)
    )
    is_composed = any(step["type"] == "NFC" for step in normalizers)
    if not keeps or (is_composed and not all(token["content"].isascii() for token in added)):
        return None
    texts = [*model["vocab"], *(token["content"] for token in added)]
    return FewestTokens(longest=max(len(text.encode()) for text in texts), is_composed=is_composed)


def _steps(step: Mapping[str, Any] | None, name: str) -> Iterable[Mapping[str, Any]]:
    if step is None:
        return ()
    return [inner for part in step[name] for inner in _steps(part, name)] if step["type"] == "Sequence" else (step,)


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer makes no text shorter; of NFC it is known by how much."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(step["content"].encode()) >= len(replaced.encode())
    return step["type"] in ("NFC", "Prepend")


def _has_all_bytes(model: Mapping[str, Any], splits: Iterable[Mapping[str, Any]]) -> bool:
    """Whether every text has tokens, so that none is dropped or joined as unknown."""
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(_BYTE_CHARS))
    return any(step["type"] == "ByteLevel" for step in splits) and all(char in model["vocab"] for char in BYTE_OF_CHAR)
