"""What a token adds to the text, as bytes: for decoders in which that depends on the token alone.

This holds for byte-level BPE and for SentencePiece BPE with byte fallback, that is for nearly every decoder-only model.
Detokenizing is then a table look-up and a UTF-8 decoder, a hundred times cheaper than to decode again and again.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Pieces:
    """What tokens add to the text."""

    of: Callable[[int], bytes]
    """Token id -> the bytes that it adds, kept once they were asked for. Ids that do not exist add none."""
    strips_space: bool
    """Whether one space at the very beginning of a text is dropped."""


def find_pieces(decoder_json: str, token_text: Callable[[int], str | None], skipped: frozenset[int]) -> Pieces | None:
    """The pieces of a decoder of the `tokenizers` library, None where tokens do not decode one by one.

    `token_text` gives a token's text in the vocabulary; tokens in `skipped` add nothing.
    """
    steps = _steps(json.loads(decoder_json))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        to_bytes, strips_space = _byte_level_piece, False
    elif _is_sentencepiece(steps):
        to_bytes, strips_space = _sentencepiece_piece, len(steps) == 4
    else:
        return None

    @functools.cache
    def piece(token: int) -> bytes:
        text = None if token in skipped else token_text(token)
        return b"" if text is None else to_bytes(text)

    return Pieces(piece, strips_space)


def decode_utf8(data: bytes, final: bool) -> tuple[str, bytes]:
    """The text of `data` and the bytes that may yet begin a character (none if `final`).

    What is not UTF-8 becomes U+FFFD, one for each maximal part that could have begun a character (Unicode 15,
    section 3.9).
    """
    text, num_used = codecs.utf_8_decode(data, "replace", final)
    return text, data[num_used:]


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    wanted: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return steps in (wanted, wanted[:3])


def _sentencepiece_piece(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace("\u2581", " ").encode()


def _byte_level_piece(text: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in text])
    except KeyError:
        return text.encode()  # an added token, which stands for itself


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


BYTE_OF_CHAR = _byte_of_char()
