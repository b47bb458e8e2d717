"""What the suite of grammars asks: vocabularies made on the spot, specs, and texts that have the form or have not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dovetail.contracts.grammar_spec import STRUCTURAL_TAG, GrammarSpec, GrammarTag

END, OTHER_END, CALL = "<end>", "<stop>", "<call>"
"""Special tokens of the vocabularies: two ends of sequence, and one that a trigger may name."""
_TEXT = """{"name": "Ada Lovelace", "age": 36, "tags": ["first", "second"], "address": {"city": "London", "zip": null}}
{"name":"x","ok":true,"no":false,"values":[1,2,3,10,100,-1.5e3]} <tool_call>{"name": "search"}</tool_call>
The quick brown fox jumps over the lazy dog, and the dog does not mind: 2024-05-17T12:30:00Z.
yes no maybe red green blue
"""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer of bytes, and what its tokens stand for."""

    tokenizer_json: str
    token_bytes: tuple[bytes | None, ...]
    """By id; None: a special token, or an id that the tokenizer does not have."""
    special: dict[str, int]
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """Of the logits: more than the tokenizer has."""
        return len(self.token_bytes)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Both ends."""
        return self.special[END], self.special[OTHER_END]

    def encode(self, text: str) -> list[int]:
        """As the tokenizer does; names of special tokens become these."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int]) -> bytes:
        """Of tokens that stand for text; special ones by their names, ends left out."""
        names = {token_id: name.encode() for name, token_id in self.special.items() if name == CALL}
        return b"".join(self.token_bytes[token_id] or names.get(token_id, b"") for token_id in token_ids)


@cache
def byte_vocabulary() -> Vocabulary:
    """A token for each byte."""
    letters = _byte_letters()
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    return _vocabulary(Tokenizer(models.BPE(vocab=vocab, merges=[])))


@cache
def bpe_vocabulary() -> Vocabulary:
    """Byte-level BPE of some hundred merges, learned from a text with JSON in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=520, initial_alphabet=sorted(_byte_letters()), show_progress=False)
    tokenizer.train_from_iterator([_TEXT], trainer)
    return _vocabulary(tokenizer)


VOCABULARIES = {"bytes": byte_vocabulary, "bpe": bpe_vocabulary}


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (END, OTHER_END, CALL)])
    byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}
    size = tokenizer.get_vocab_size()
    special = {name: size - 3 + index for index, name in enumerate((END, OTHER_END, CALL))}
    found: list[bytes | None] = []
    for token_id in range(size + 37):
        token = tokenizer.id_to_token(token_id) if token_id < size and token_id not in special.values() else None
        found.append(None if token is None else bytes(byte_of[letter] for letter in token))
    return Vocabulary(tokenizer.to_str(), tuple(found), special, tokenizer)


def _byte_letters() -> list[str]:
    """By byte, the character that stands for it in byte-level vocabularies (GPT-2's)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


@dataclass(frozen=True)
class KeywordCase:
    """A keyword of JSON Schema at work. Of the valid values the first must be possible, the others may be left out: a
    plugin may fix the order of properties, say. Invalid ones must not be possible."""

    schema: dict[str, Any]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


def _object(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


_POINT = _object(properties={"x": {"type": "integer"}, "y": {"type": "integer"}}, additionalProperties=False)

KEYWORDS: dict[str, KeywordCase] = {
    "type": KeywordCase({"type": "integer"}, (12,), ("12", True, [1], 1.5)),
    "enum": KeywordCase({"enum": ["a", 3, None]}, ("a", 3, None), ("b", 4, "3")),
    "const": KeywordCase({"const": {"a": [1]}}, ({"a": [1]},), ({"a": [2]}, {}, 1)),
    "anyOf": KeywordCase({"anyOf": [{"type": "null"}, {"type": "integer"}]}, (None, 3), ("x", [])),
    "oneOf": KeywordCase({"oneOf": [{"type": "null"}, {"type": "string"}]}, (None, "x"), (3, [])),
    "allOf": KeywordCase({"allOf": [{"type": "integer"}, {"minimum": 3}]}, (3, 40), (2, "x")),
    "not": KeywordCase({"type": ["string", "null"], "not": {"type": "null"}}, ("x",), (None,)),
    "if": KeywordCase(
        {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}, "else": {"maximum": 3}}, (6, 3), (7, 4)
    ),
    "$ref": KeywordCase({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, (3,), ("x", None)),
    "items": KeywordCase({"type": "array", "items": {"type": "integer"}}, ([1, 2], []), (["x"], [1, "x"])),
    "prefixItems": KeywordCase(
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 2},
        ([1, None],),
        ([None, 1], [1, None, 2], [1]),
    ),
    "minItems": KeywordCase({"type": "array", "items": {"type": "null"}, "minItems": 2}, ([None, None],), ([], [None])),
    "maxItems": KeywordCase({"type": "array", "items": {"type": "null"}, "maxItems": 1}, ([None], []), ([None, None],)),
    "uniqueItems": KeywordCase({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ([1, 2],), ([1, 1],)),
    "contains": KeywordCase({"type": "array", "contains": {"const": 3}}, ([1, 3],), ([], [1])),
    "properties": KeywordCase(_object(properties={"a": {"type": "integer"}}), ({"a": 1},), ({"a": "x"},)),
    "additionalProperties": KeywordCase(_POINT, ({"x": 1, "y": 2}, {"x": 1}), ({"z": 1}, {"x": 1, "z": 2})),
    "patternProperties": KeywordCase(
        _object(patternProperties={"^n_": {"type": "integer"}}, additionalProperties=False),
        ({"n_a": 1},),
        ({"n_a": "x"}, {"m": 1}),
    ),
    "required": KeywordCase(_POINT | {"required": ["x", "y"]}, ({"x": 1, "y": 2},), ({"x": 1}, {})),
    "minProperties": KeywordCase(
        _object(additionalProperties={"type": "null"}, minProperties=2), ({"a": None, "b": None},), ({}, {"a": None})
    ),
    "maxProperties": KeywordCase(
        _object(additionalProperties={"type": "null"}, maxProperties=1), ({"a": None}, {}), ({"a": None, "b": None},)
    ),
    "propertyNames": KeywordCase(_object(propertyNames={"pattern": "^a"}), ({"ab": 1},), ({"b": 1},)),
    "dependentRequired": KeywordCase(
        _POINT | {"dependentRequired": {"x": ["y"]}}, ({"x": 1, "y": 2}, {"y": 1}), ({"x": 1},)
    ),
    "minLength": KeywordCase({"type": "string", "minLength": 2}, ("ab", "äöü"), ("", "a", "ä")),
    "maxLength": KeywordCase({"type": "string", "maxLength": 2}, ("ab", "ä", ""), ("abc", "äöü")),
    "pattern": KeywordCase({"type": "string", "pattern": "^a[0-9]+$"}, ("a10",), ("a", "b1", "a1b")),
    "format": KeywordCase({"type": "string", "format": "date"}, ("2024-02-29",), ("yesterday", "2024-1-1", "")),
    "minimum": KeywordCase({"type": "integer", "minimum": -3}, (-3, 20), (-4, -30)),
    "maximum": KeywordCase({"type": "integer", "maximum": 120}, (120, -7), (121, 1000)),
    "exclusiveMinimum": KeywordCase({"type": "integer", "exclusiveMinimum": 9}, (10, 900), (9, 1)),
    "exclusiveMaximum": KeywordCase({"type": "integer", "exclusiveMaximum": 0}, (-1, -22), (0, 3)),
    "multipleOf": KeywordCase({"type": "integer", "multipleOf": 3}, (9, 0), (10, 1)),
}
"""By keyword. One that a plugin does not declare must be refused."""

FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "date": (("2024-02-29",), ("2024-13-01", "x", "")),
    "time": (("12:30:00Z",), ("25:00:00Z", "x")),
    "date-time": (("2024-02-29T12:30:00Z",), ("2024-02-29", "x")),
    "duration": (("P1DT2H",), ("1 day", "P")),
    "email": (("ada@example.com",), ("ada", "@", "")),
    "hostname": (("example.com",), ("-x", "a b")),
    "ipv4": (("127.0.0.1",), ("256.0.0.1", "1.2.3")),
    "ipv6": (("::1",), ("12345::", "x")),
    "uuid": (("12345678-1234-1234-1234-123456789abc",), ("12345678", "g2345678-1234-1234-1234-123456789abc")),
    "uri": (("https://example.com/a?b=c",), ("no uri", "")),
}
"""By value of `format`: texts that have it, of which the first must be possible, and texts that have not."""

ANNOTATED = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Point",
    "description": "on a plane",
    "examples": [{"x": 1, "y": 2}],
    "default": None,
    "$comment": "for readers",
    **_POINT,
}
"""Keywords that no value can violate: they are no reason to refuse."""

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _object(
        properties={
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mood": {"enum": ["good", "bad", "ähm"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        },
        required=["name", "age"],
        additionalProperties=False,
    ),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _object(
                properties={
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                required=["value", "next"],
                additionalProperties=False,
            )
        },
    },
    "order": _object(
        properties={
            "kind": {"enum": ["a", "b"]},
            "lines": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "count": {"type": "integer", "minimum": 1, "maximum": 40},
        },
        required=["kind", "lines"],
        additionalProperties=False,
    ),
    "number": {"type": "number"},
    "string": {"type": "string"},
}
"""Whose outputs are compared with what the library jsonschema says of them."""
SCHEMA_KEYWORDS = {
    "person": frozenset({"type", "properties", "required", "additionalProperties", "enum", "items", "maxItems"})
    | {"maxLength", "minimum", "maximum"},
    "tree": frozenset({"type", "properties", "required", "additionalProperties", "anyOf", "$ref"}),
    "order": frozenset({"type", "properties", "required", "additionalProperties", "enum", "items", "maxItems"})
    | {"minimum", "maximum"},
    "number": frozenset({"type"}),
    "string": frozenset({"type"}),
}
"""By schema, the keywords that it has."""

REGEXES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    r"[a-c]+\d{2,3}": (("a12", "abc123"), ("a1", "a1234", "12")),
    r"^(yes|no)( maybe)?$": (("yes", "no maybe"), ("", "yesno", "maybe")),
    r".{3}": (("abc", "äöü"), ("a\nb", "ab", "abcd")),
    r"\w+@\w+\.(?:com|org)": (("ada@example.org",), ("ada@example.net", "ä@b.com")),
    r"[^\s\"\\]*": (("", "a{b"), ("a b", '"', "\\")),
    r"a{0,2}b?\.\*": (("aab.*", ".*"), ("aaab.*", "bxx")),
    # JSON by their looks: the form of a spec says what its source is, not the text.
    '["a"]': (("a", '"'), ('["a"]', "[", "b")),
    r'\["a"\]': (('["a"]',), ("a", '"', '["b"]')),
}
"""By pattern: texts that it matches as a whole, and texts that it does not."""

NOT_REGEXES = (
    "\ud800",
    "(a",
    "a)",
    "[a",
    "*a",
    "a{3,1}",
    "a{" + "9" * 9999 + "}",
    r"\1",
    r"(?=a)b",
    r"a*?",
    r"\bword\b",
    "(?i)a",
    "a$b",
)
"""Wrong, or beyond the notation."""

CHOICES = ["red", "red wine", "green\n", 'a "quoted" \\ one', "ünï/cødé", "<call>"]

TAGS = GrammarSpec(
    form=STRUCTURAL_TAG,
    triggers=("<f=",),
    tags=(
        GrammarTag(begin="<f=int>", content=GrammarSpec(form="regex", source="[0-9]{1,3}"), end="</f>"),
        GrammarTag(begin="<f=word>", content=GrammarSpec(form="choice", source='["on", "off"]'), end="</f>"),
    ),
)
TAGGED = (
    ("", "hello", "a <f=int>12</f> b", "<f=word>on</f><f=int>1</f>", "<f", "1 < f"),
    ("<f=x", "<f=int>x", "<f=word>o</f>"),
)
"""Texts that `TAGS` allows, and texts that are wrong before they end."""
CALLS = GrammarSpec(
    form=STRUCTURAL_TAG,
    triggers=(CALL,),
    tags=(GrammarTag(begin=CALL, content=GrammarSpec(form="regex", source="[0-9]{2}"), end=CALL),),
)
"""A special token as trigger and end."""

SAMPLES: dict[str, GrammarSpec] = {
    "json_schema": GrammarSpec(form="json_schema", source=json.dumps(SCHEMAS["order"]), max_whitespace=1),
    "json_object": GrammarSpec(form="json_object"),
    "regex": GrammarSpec(form="regex", source=r"[a-c]+\d{2,3}"),
    "choice": GrammarSpec(form="choice", source=json.dumps(CHOICES)),
    "lark": GrammarSpec(form="lark", source='start: "(" (start | WORD)? ")"\nWORD: /[a-z]{1,4}/\n'),
    "gbnf": GrammarSpec(form="gbnf", source='root ::= "(" (root | word)? ")"\nword ::= [a-z] [a-z]*\n'),
    STRUCTURAL_TAG: TAGS,
}
"""One spec of each form that the contract defines."""

WRONG: dict[str, tuple[str, ...]] = {
    "json_schema": (
        *("", "{", "[]", "3", "null", '{"type": "strng"}', '{"type": 3}', '{"$ref": "#/$defs/nowhere"}', '{"$ref": 3}'),
        *('{"anyOf": 3}', '{"anyOf": []}', '{"enum": 3}', '{"type": "object", "properties": [1]}'),
        *(
            '{"type": "object", "required": 3}',
            '{"type": "object", "required": [3]}',
            '{"type": "string", "format": [3]}',
        ),
        *('{"type": "array", "items": 3}', '{"type": "integer", "minimum": "a"}', "\ud800"),
    ),
    "regex": NOT_REGEXES,
    "choice": ("", "[]", "[1]", '{"a": 1}', "red"),
    "lark": ("", "start: nothing", "no rule at all"),
    "gbnf": ("", "root ::= nothing", "no rule at all"),
}
"""Sources that cannot be, by form."""


def _many(count: int) -> list[str]:
    return [f"value {index}" for index in range(count)]


@cache
def bombs() -> dict[str, GrammarSpec]:
    """Specs on which a compiler, or the matcher behind it, may spend more than anybody has."""
    schemas: dict[str, Any] = {
        "100,000 alternatives": {"enum": _many(100_000)},
        "20,000 properties": _object(properties={name: {"type": "string"} for name in _many(20_000)}),
        "a schema that is itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        "schemas that are each other": {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"allOf": [{"$ref": "#/$defs/b"}]},
                "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
            },
        },
        "products of alternatives": {
            "allOf": [{"anyOf": [_object(required=[f"k{i}{j}"]) for j in range(6)]} for i in range(12)]
        },
        "a large divisor": {"type": "integer", "multipleOf": 1_000_003},
        "long arrays of long arrays": {
            "type": "array",
            "minItems": 9000,
            "items": {"type": "array", "minItems": 9000, "items": {"type": "array", "minItems": 9000}},
        },
    }
    regexes = {
        "nested repetitions": "(((((a{2}){99}){99}){99}){99}){99}",
        "optional letters": "(a?){5000}a{5000}",
        "ambiguity": "(a|b)*a(a|b){2000}",
        "many stars": ".*" * 300 + "x",
        "deep groups": "(" * 5000 + "a" + ")" * 5000,
    }
    found = {name: GrammarSpec(form="json_schema", source=json.dumps(schema)) for name, schema in schemas.items()}
    found |= {name: GrammarSpec(form="regex", source=source) for name, source in regexes.items()}
    found["a deep schema"] = GrammarSpec(
        form="json_schema", source='{"type":"array","items":' * 20_000 + "{}" + "}" * 20_000
    )
    found["100,000 choices"] = GrammarSpec(form="choice", source=json.dumps(_many(100_000)))
    return found
