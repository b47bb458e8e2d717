"""What each verdict word of a report means for its reader, as the terminal and the page colour it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Tone = Literal["good", "bad", "caution", "soft"]
"""good: as one wants it. bad: worse, or wrong. caution: something is missing or other than asked for. soft: nothing was
found, or looked for."""

_WORDS: Mapping[Tone, tuple[str, ...]] = {
    "good": (
        "faster",
        "better",
        "identical",
        "lossless",
        "consistent",
        "ran",
        "ran, as the baseline",
        "keeps up",
    ),
    "bad": ("slower", "worse", "LOSSY", "REAL", "failed", "overloaded"),
    "caution": (
        "lossy by declaration",
        "not shown",
        "too few prompts",
        "too few segments",
        "too short",
        "ran, other tokens",
        "ran, other log probabilities",
        "refused",
    ),
    "soft": (
        "undecided",
        "not judged",
        "same",
        "tie",
        "ran, no effect here",
        "ran, nothing drafted",
        "not tried",
        "not served",
    ),
}

TONES: Mapping[str, Tone] = {word: tone for tone, words in _WORDS.items() for word in words}
"""By word, wherever it fills a cell."""
