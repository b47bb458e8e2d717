"""The tokenizer in GGUF metadata as JSON of the `tokenizers` library, giving the ids of the original tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import TokenizerFiles
from dovetail.plugins.weight_formats.gguf.header import Header
from dovetail.plugins.weight_formats.gguf.pretokenizers import IGNORES_MERGES, NORMALIZERS, PRE_TOKENIZERS
from dovetail.plugins.weight_formats.gguf.texts import Texts

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_PREFIX = "tokenizer.ggml."


class _Vocabulary:
    """The parts that every kind of tokenizer has."""

    def __init__(self, header: Header):
        self.header = header
        self.path = header.path
        self.tokens = self.required_texts("tokens")
        kinds = header.numbers(_PREFIX + "token_type")
        self.kinds: list[int] = [_NORMAL] * len(self.tokens) if kinds is None else kinds.tolist()
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise ModelError(f"{self.path}: the vocabulary has token {twice!r} twice; {_INSTEAD}")
        if len(self.kinds) != len(self.tokens):
            raise ModelError(f"{self.path} is malformed: {len(self.tokens)} tokens, {len(self.kinds)} token types")

    def required_texts(self, key: str) -> list[str]:
        texts: Texts = self.given(key, self.header.texts(_PREFIX + key))
        return texts.decoded()

    def given(self, key: str, value: Any) -> Any:
        if value is None:
            raise ModelError(f"{self.path}: the metadata lacks {_PREFIX}{key}; {_INSTEAD}")
        return value

    def special_id(self, key: str) -> int | None:
        value = self.header.number(f"{_PREFIX}{key}_token_id")
        return int(value) if value is not None and 0 <= value < len(self.tokens) else None

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are found in the text before anything else is done to it."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": index, "content": self.tokens[index], **flags, "special": kind != _USER_DEFINED}
            for index, kind in enumerate(self.kinds)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]

    def post_processor(self) -> dict[str, Any] | None:
        """Appends the end token where the file asks for it; the begin token is `TokenizerFiles.add_bos_token`."""
        eos = self.special_id("eos")
        if not self.header.flag(_PREFIX + "add_eos_token", False) or eos is None:
            return None
        text = self.tokens[eos]
        pieces = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": text, "type_id": 0}}]
        known = {text: {"id": text, "ids": [eos], "tokens": [text]}}
        return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": known}


_INSTEAD = "set model.tokenizer to a directory with tokenizer.json, or model.tokenizer_mode to none"


def build_tokenizer(header: Header) -> TokenizerFiles | None:
    """The tokenizer of a file's metadata, None where it has none.

    Raises `ModelError` for one whose splitting rules are not known: near enough would be wrong ids.
    """
    model = header.text(_PREFIX + "model")
    if model in (None, "none", "no_vocab"):
        return None
    if model not in _BUILDERS:
        raise ModelError(f"{header.path}: tokenizer model {model!r} is not supported (gpt2 and llama are); {_INSTEAD}")
    vocabulary = _Vocabulary(header)
    parts, adds_bos = _BUILDERS[model](vocabulary)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "post_processor": vocabulary.post_processor(),
        **parts,
    }
    bos = vocabulary.special_id("bos")
    return TokenizerFiles(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False),
        chat_template=header.text("tokenizer.chat_template"),
        bos_token_id=bos,
        eos_token_id=vocabulary.special_id("eos"),
        add_bos_token=header.flag(_PREFIX + "add_bos_token", adds_bos) and bos is not None,
    )


def _byte_level(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """Byte-level BPE (GPT-2, section 2.2): the splitting of text into words goes by name."""
    pre = vocabulary.header.text(_PREFIX + "pre") or "default"
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{vocabulary.path}: pre-tokenizer {pre!r} is not known (known: {', '.join(sorted(PRE_TOKENIZERS))}); "
            f"{_INSTEAD}"
        )
    merges = []
    for merge in vocabulary.required_texts("merges"):
        # The first character may itself be a space.
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    is_whole_word = pre in IGNORES_MERGES
    model = _bpe(vocabulary, merges, ignore_merges=is_whole_word)
    parts = {
        "normalizer": NORMALIZERS.get(pre),
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    return parts, is_whole_word


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """SentencePiece BPE: the best-scored pair that forms a token merges first, unknown characters become bytes."""
    scores = vocabulary.given("scores", vocabulary.header.numbers(_PREFIX + "scores")).tolist()
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{vocabulary.path} is malformed: {len(vocabulary.tokens)} tokens, {len(scores)} scores")
    unknown = vocabulary.special_id("unknown")
    adds_space = vocabulary.header.flag(_PREFIX + "add_space_prefix", True)
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_marks]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(
            vocabulary,
            _merges_from_scores(vocabulary, scores),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=vocabulary.tokens[unknown] if unknown is not None else None,
        ),
    }
    return parts, True


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best-scored token first, as SentencePiece merges."""
    mergeable = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (_NORMAL, _USER_DEFINED, _UNUSED)
    }
    order = sorted(mergeable.items(), key=lambda item: -scores[item[1]])
    return [
        (token[:cut], token[cut:])
        for token, _ in order
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    defaults = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**defaults, **settings, "vocab": vocabulary.ids, "merges": merges}
