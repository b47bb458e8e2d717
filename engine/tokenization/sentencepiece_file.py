"""A tokenizer.model of SentencePiece as JSON of the `tokenizers` library, without SentencePiece.

The file is a protocol buffer (`sentencepiece_model.proto`). What is read here is what language models were made with:
BPE over unchanged text. Anything else is left to transformers and the libraries that it needs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ModelError
from dovetail.engine.tokenization.directory import read_json

_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_SPACE = "\u2581"
_CLASSES = ("LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
"""Values of tokenizer_class that do to a text what the file says, and nothing else."""
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@dataclass(frozen=True)
class _Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Converted:
    """A tokenizer."""

    json: str
    special_tokens: Mapping[str, str]
    """Role -> text, "bos_token" -> "<s>"."""


def convert(directory: Path) -> Converted | None:
    """The tokenizer of `directory`/tokenizer.model; None where there is none, or of another kind.

    Text begins with BOS unless tokenizer_config.json says otherwise, and tokens that it or added_tokens.json adds are
    known. Raises `ModelError` for a file that is damaged.
    """
    path = directory / "tokenizer.model"
    config = read_json(directory / "tokenizer_config.json")
    name = str(config.get("tokenizer_class") or _CLASSES[0]).removesuffix("Fast")
    if not path.is_file() or name not in _CLASSES or "auto_map" in config:
        return None
    try:
        model = _fields(path.read_bytes())
        trainer, normalizer = (_single(model, number) for number in (2, 3))
        if not model.get(1) or not _is_plain_bpe(trainer, normalizer):
            return None
        pieces = [_piece(_fields(raw)) for raw in model[1]]
    except (ValueError, IndexError, struct.error, TypeError) as error:
        raise ModelError(f"{path} is damaged, or no file of SentencePiece: {error}") from error
    roles = {"unk_token": trainer.get(40, 0), "bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2)}
    special = {role: pieces[index].text for role, index in roles.items() if 0 <= index < len(pieces)}
    return Converted(json.dumps(_tokenizer(directory, pieces, trainer, normalizer), ensure_ascii=False), special)


def _fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of a message by number, in order: integers, floats, and bytes for everything else."""
    found: dict[int, list[Any]] = {}
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        value: Any
        match tag & 7:
            case 0:
                value, position = _varint(data, position)
            case 2:
                length, position = _varint(data, position)
                value, position = data[position : position + length], position + length
            case 5:
                value, position = struct.unpack_from("<f", data, position)[0], position + 4
            case 1:
                value, position = data[position : position + 8], position + 8
            case kind:
                raise ValueError(f"wire type {kind} at byte {position}")
        if position > len(data):
            raise ValueError(f"it ends within a field that goes up to byte {position}")
        found.setdefault(tag >> 3, []).append(value)
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value - (1 << 64) if value >= 1 << 63 else value), position
    raise ValueError(f"a number without end at byte {position}")


def _single(message: Mapping[int, list[Any]], number: int) -> dict[int, Any]:
    """A message within a message, each of its fields once."""
    return {key: values[-1] for key, values in _fields(message[number][-1]).items()} if number in message else {}


def _is_plain_bpe(trainer: Mapping[int, Any], normalizer: Mapping[int, Any]) -> bool:
    changes_text = bool(normalizer.get(2)) or bool(normalizer.get(4, 1)) or not normalizer.get(5, 1)
    return trainer.get(3) == _BPE and bool(trainer.get(35)) and not changes_text


def _piece(fields: Mapping[int, list[Any]]) -> _Piece:
    return _Piece(fields[1][-1].decode(), float(fields.get(2, [0.0])[-1]), int(fields.get(3, [_NORMAL])[-1]))


def _tokenizer(
    directory: Path, pieces: list[_Piece], trainer: Mapping[int, Any], normalizer: Mapping[int, Any]
) -> dict[str, Any]:
    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    adds_space = bool(normalizer.get(3, 1))
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [*_own_tokens(pieces), *_added_tokens(directory, vocabulary)],
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_marks]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(directory, pieces, trainer),
        "decoder": {"type": "Sequence", "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": next((piece.text for piece in pieces if piece.kind == _UNKNOWN), None),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": list(_merges(pieces)),
        },
    }


def _merges(pieces: list[_Piece]) -> Iterator[tuple[str, str]]:
    """Every way to put a piece together from two others, best-scored piece first, as SentencePiece merges."""
    usable = [piece for piece in pieces if piece.kind in (_NORMAL, _USER_DEFINED, _UNUSED)]
    known = {piece.text for piece in usable}
    for piece in sorted(usable, key=lambda piece: -piece.score):
        for cut in range(1, len(piece.text)):
            if piece.text[:cut] in known and piece.text[cut:] in known:
                yield piece.text[:cut], piece.text[cut:]


def _own_tokens(pieces: list[_Piece]) -> list[dict[str, Any]]:
    return [
        {"id": index, "content": piece.text, **_FLAGS, "special": piece.kind != _USER_DEFINED}
        for index, piece in enumerate(pieces)
        if piece.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _added_tokens(directory: Path, vocabulary: Mapping[str, int]) -> list[dict[str, Any]]:
    """Tokens that the directory adds to those of the file."""
    given = {int(index): text for text, index in read_json(directory / "added_tokens.json").items()}
    decoder = read_json(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    special = {int(index): bool(token.get("special", False)) for index, token in decoder.items()}
    given |= {int(index): token["content"] for index, token in decoder.items()}
    return [
        {"id": index, "content": text, **_FLAGS, "special": special.get(index, False)}
        for index, text in sorted(given.items())
        if text not in vocabulary
    ]


def _post_processor(directory: Path, pieces: list[_Piece], trainer: Mapping[int, Any]) -> dict[str, Any] | None:
    """Puts BOS in front, and EOS behind where tokenizer_config.json asks for it."""
    config = read_json(directory / "tokenizer_config.json")
    bos, eos = trainer.get(41, 1), trainer.get(42, 2)
    wanted = [bos if config.get("add_bos_token", True) else -1, eos if config.get("add_eos_token", False) else -1]
    first, last = ([pieces[index].text] if 0 <= index < len(pieces) else [] for index in wanted)
    if not first and not last:
        return None

    def template(*sequences: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for name in sequences:
            parts += [{"SpecialToken": {"id": text, "type_id": 0}} for text in first]
            parts.append({"Sequence": {"id": name, "type_id": 0}})
            parts += [{"SpecialToken": {"id": text, "type_id": 0}} for text in last]
        return parts

    ids = {piece.text: index for index, piece in enumerate(pieces)}
    known = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in (*first, *last)}
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": known,
    }
