"""How byte-level tokenizers split text into words, by the name in tokenizer.ggml.pre.

The regular expressions are those of the models' own tokenizer.json files. "default" (and a file that names none) is
what llama.cpp does then, which no model was trained with.
"""

from __future__ import annotations

from typing import Any

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _split(*patterns: str) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _BYTES]}


_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]}
_LLAMA3 = _split("|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SYMBOLS, _WHITESPACE)))
_QWEN2 = _split("|".join((_CONTRACTIONS, _WORD, r"\p{N}", _SYMBOLS, _WHITESPACE)))
_TEKKEN = _split("|".join((_CASED, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _WHITESPACE)))
_DEFAULT = _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")

_NAMES: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    (_DIGITS, ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")),
    (_GPT2, ("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "gigachat")),
    (_LLAMA3, ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx")),
    (_QWEN2, ("qwen2", "deepseek-r1-qwen", "stablelm2")),
    (_TEKKEN, ("tekken",)),
    (_DEFAULT, ("default",)),
)

PRE_TOKENIZERS: dict[str, dict[str, Any]] = {name: pre for pre, names in _NAMES for name in names}
NORMALIZERS: dict[str, dict[str, Any]] = {"qwen2": {"type": "NFC"}}
"""What the original tokenizers do to a text before they split it; GGUF files do not say it, and llama.cpp does not do
it."""
IGNORES_MERGES = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))
"""A word that is a token is taken whole, and text begins with BOS unless the file says otherwise."""
