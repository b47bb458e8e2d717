"""JSON schemas as people write them, and others that are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 100}
FLAG: Schema = {"type": "boolean"}


def record(*, optional: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """A closed object; all properties but the optional ones are required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def array(items: Schema, least: int = 0, most: int = 3) -> Schema:
    """An array of bounded length."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(**bounds: Any) -> Schema:
    """A string."""
    return {"type": "string", **bounds}


def number(kind: str = "number", **bounds: Any) -> Schema:
    """A number."""
    return {"type": kind, **bounds}


def described(**schemas: Schema) -> Iterator[tuple[str, Schema]]:
    """Named with words for underscores."""
    for name, schema in schemas.items():
        yield name.replace("_", " "), schema


_ADDRESS = record(street=text(maxLength=30), city=text(maxLength=20), zip=text(pattern="^[0-9]{5}$"))
_PERSON = record(name=text(maxLength=30), age=number("integer", minimum=0, maximum=150), email=text(format="email"))

SCALARS = described(
    short_text=text(maxLength=12),
    exact_length=text(minLength=5, maxLength=5),
    long_enough=text(minLength=20, maxLength=40),
    integer={"type": "integer"},
    percent=number("integer", minimum=0, maximum=100),
    negative=number("integer", maximum=-1, minimum=-999),
    exclusive=number("integer", exclusiveMinimum=10, exclusiveMaximum=13),
    number={"type": "number"},
    probability=number(minimum=0, maximum=1),
    temperature=number(minimum=-273.15, maximum=1000.5),
    narrow=number(exclusiveMinimum=0.25, exclusiveMaximum=0.5),
    dozen=number("integer", multipleOf=12, minimum=0, maximum=144),
    half=number(multipleOf=0.5, minimum=0, maximum=10),
    boolean=FLAG,
    nothing={"type": "null"},
    maybe_text={"type": ["string", "null"], "maxLength": 10},
    text_or_integer={"type": ["string", "integer"], "maxLength": 10},
    three_types={"type": ["boolean", "null", "integer"]},
)

CHOICES = described(
    colour={"enum": ["red", "green", "blue"]},
    mixed_enum={"enum": ["yes", 1, 2.5, None, True]},
    one_value={"enum": ["only"]},
    constant={"const": "fixed"},
    constant_number={"const": 42},
    constant_object={"const": {"kind": "none", "items": [1, "two"]}},
    common_prefixes={"enum": ["a", "ab", "abc", "abcd", "b"]},
    hundred_values={"enum": [f"item {index}" for index in range(100)]},
    unicode_enum={"enum": ["日本", "España", "Ελλάδα", "🙂"]},
    quoted_enum={"enum": ['say "hi"', "back\\slash", "line\nbreak", "tab\t"]},
    escaped_enum={"enum": ["/", "</script>", "\u0001", "\u2028"]},
    enum_of_objects={"enum": [{"x": 1}, {"y": [True, None]}]},
)

PATTERNS = described(
    digits=text(pattern="^[0-9]{3}$"),
    phone=text(pattern=r"^\+[0-9]{2} [0-9]{3}-[0-9]{4}$"),
    plate=text(pattern="^[A-Z]{2}-[0-9]{1,4}$"),
    identifier=text(pattern="^[a-z_][a-z0-9_]{0,15}$"),
    version=text(pattern=r"^v?[0-9]+\.[0-9]+\.[0-9]+$"),
    alternatives=text(pattern="^(cat|dog|bird)s?$"),
    hexadecimal=text(pattern="^#[0-9a-fA-F]{6}$"),
    unanchored=text(pattern="[0-9]{2}", maxLength=8),
    begins=text(pattern="^Dear ", maxLength=20),
    letters_of_many_scripts=text(pattern="^[äöüßé]{2,4}$"),
    price=text(pattern=r"^\$[0-9]{1,4}\.[0-9]{2}$"),
    with_quotes=text(pattern='^"[a-z]{1,5}"$'),
    with_backslash=text(pattern=r"^[A-Z]:\\[a-z]{1,6}$"),
    date=text(format="date"),
    time=text(format="time"),
    date_time=text(format="date-time"),
    duration=text(format="duration"),
    email=text(format="email"),
    ipv4=text(format="ipv4"),
    ipv6=text(format="ipv6"),
    uuid=text(format="uuid"),
    hostname=text(format="hostname"),
    uri=text(format="uri"),
)

ARRAYS = described(
    texts=array(text(maxLength=10)),
    exactly_two=array(COUNT, 2, 2),
    at_least_one=array(FLAG, 1, 4),
    empty={"type": "array", "maxItems": 0},
    matrix=array(array(COUNT, 2, 2), 2, 2),
    enums=array({"enum": ["a", "b"]}, 3, 5),
    records=array(record(id=COUNT, ok=FLAG), 1, 2),
    pair={"type": "array", "prefixItems": [text(maxLength=8), COUNT], "items": False, "minItems": 2},
    head_and_rest={"type": "array", "prefixItems": [FLAG], "items": COUNT, "minItems": 1, "maxItems": 4},
    nullable_items=array({"type": ["integer", "null"]}, 2, 3),
    any_items={"type": "array", "maxItems": 2},
    different_texts={**array({"enum": ["a", "b", "c"]}, 2, 3), "uniqueItems": True},
    contains_one={**array(COUNT, 1, 3), "contains": {"const": 7}},
)

OBJECTS = described(
    person=_PERSON,
    address=_ADDRESS,
    nested=record(person=_PERSON, address=_ADDRESS),
    deep=record(a=record(b=record(c=record(d=record(e=COUNT))))),
    five_fields=record(
        name=text(maxLength=20), age=COUNT, mood={"enum": ["good", "bad"]}, tags=array(text(maxLength=8)), ok=FLAG
    ),
    optional_fields=record(a=COUNT, b=COUNT, c=COUNT, optional=("b", "c")),
    all_optional=record(a=FLAG, b=FLAG, optional=("a", "b")),
    no_fields=record(),
    twenty_fields=record(**{f"field_{index}": COUNT for index in range(20)}),
    odd_names=record(**{"first name": COUNT, "a/b": COUNT, "ünï": COUNT, 'quo"te': COUNT, "$id2": COUNT, "": COUNT}),
    open_object={"type": "object", "properties": {"id": COUNT}, "required": ["id"]},
    map_of_numbers={"type": "object", "additionalProperties": COUNT, "maxProperties": 3},
    map_with_least={"type": "object", "additionalProperties": COUNT, "minProperties": 1, "maxProperties": 2},
    pattern_names={"type": "object", "patternProperties": {"^x_": COUNT}, "additionalProperties": False},
    fixed_and_map={"type": "object", "properties": {"id": COUNT}, "required": ["id"], "additionalProperties": TEXT},
    required_without_property={"type": "object", "required": ["name"], "additionalProperties": COUNT},
    described_fields={
        "title": "Joke",
        "description": "A joke to tell",
        "type": "object",
        "properties": {
            "setup": {"type": "string", "title": "Setup", "description": "The setup", "maxLength": 60},
            "rating": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "examples": [3]},
        },
        "required": ["setup"],
    },
    dependent={
        **record(card=text(pattern="^[0-9]{4}$"), owner=text(maxLength=10), optional=("card", "owner")),
        "dependentRequired": {"card": ["owner"]},
    },
)

CHOICES_OF_SCHEMAS = described(
    number_or_text={"anyOf": [COUNT, text(maxLength=10)]},
    shapes={
        "anyOf": [
            record(kind={"const": "circle"}, radius=COUNT),
            record(kind={"const": "square"}, side=COUNT),
            record(kind={"const": "point"}),
        ]
    },
    one_of={"oneOf": [record(a=COUNT), record(b=COUNT)]},
    one_of_overlapping={"oneOf": [number("integer", multipleOf=2), number("integer", multipleOf=3)]},
    nullable_record=record(child={"anyOf": [record(x=COUNT), {"type": "null"}]}),
    all_of={"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    all_of_objects={"allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]}, {"maxProperties": 1}]},
    discriminated={
        "oneOf": [record(type={"const": "cat"}, lives=COUNT), record(type={"const": "dog"}, tricks=array(TEXT, 0, 2))],
        "discriminator": {"propertyName": "type"},
    },
    negated={"not": {"type": "string"}},
    conditional={"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}},
    any_value=record(value={}),
    never={"anyOf": [False, COUNT]},
)

REFERENCES = described(
    definition={"$defs": {"count": COUNT}, **record(a={"$ref": "#/$defs/count"}, b={"$ref": "#/$defs/count"})},
    older_definitions={"definitions": {"flag": FLAG}, **record(on={"$ref": "#/definitions/flag"})},
    chain={"$defs": {"a": {"$ref": "#/$defs/b"}, "b": COUNT}, "$ref": "#/$defs/a"},
    tree={
        "$defs": {"node": record(value=COUNT, children=array({"$ref": "#/$defs/node"}, 0, 2))},
        "$ref": "#/$defs/node",
    },
    linked_list=record(value=COUNT, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    expression={
        "$defs": {
            "term": {"anyOf": [COUNT, {"$ref": "#/$defs/sum"}]},
            "sum": record(left={"$ref": "#/$defs/term"}, right={"$ref": "#/$defs/term"}),
        },
        "$ref": "#/$defs/sum",
    },
    mutual={
        "$defs": {
            "folder": record(name=text(maxLength=8), files=array({"$ref": "#/$defs/file"}, 0, 2)),
            "file": record(name=text(maxLength=8), inside={"anyOf": [{"$ref": "#/$defs/folder"}, {"type": "null"}]}),
        },
        "$ref": "#/$defs/folder",
    },
    reference_with_bounds={"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5, "maximum": 6},
    to_a_property=record(a=COUNT, b={"$ref": "#/properties/a"}),
    elsewhere={"$ref": "https://example.org/schema.json"},
)


def drawn(count: int, seed: int) -> Iterator[tuple[str, Schema]]:
    """Random schemas of the keywords that services ask for."""
    for index in range(count):
        yield f"drawn {index}", _draw(random.Random(f"{seed}-{index}"), 3)


def _draw(rng: random.Random, depth: int) -> Schema:
    leaves = [_draw_text, _draw_number, _draw_choice]
    inner = [_draw_object, _draw_object, _draw_array, _draw_any_of]
    return rng.choice(leaves if depth == 0 else [*leaves, *inner, *inner])(rng, depth)


def _draw_text(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(0, 4)
    letters, most = rng.choice(["a-f", "0-9", "α-ω", "x", "-_."]), least + rng.randrange(0, 5)
    return rng.choice(
        [
            text(minLength=least, maxLength=least + rng.randrange(0, 12)),
            text(pattern=f"^[{letters}]{{{least},{most}}}$"),
            text(format=rng.choice(["date", "uuid", "ipv4", "time", "email"])),
        ]
    )


def _draw_number(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-1000, 1000)
    if rng.random() < 0.5:
        return number("integer", minimum=low, maximum=low + rng.randrange(0, 500))
    low_key, high_key = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
    return number(**{low_key: low / 8, high_key: low / 8 + rng.randrange(1, 100) / 16})


def _draw_choice(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = ["a", "b c", "ü", "", "\\", '"', 0, -1.5, None, True, [], {"k": "v"}]
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _draw_object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", "a b", "x.y", "items", "type", "_", "née"], rng.randrange(0, 5))
    optional = tuple(name for name in names if rng.random() < 0.3)
    made = record(optional=optional, **{name: _draw(rng, depth - 1) for name in names})
    return made if rng.random() < 0.8 else {**made, "additionalProperties": COUNT, "maxProperties": len(names) + 2}


def _draw_array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(0, 3)
    return array(_draw(rng, depth - 1), least, least + rng.randrange(0, 3))


def _draw_any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_draw(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}


HAND_MADE = dict(
    pair for group in (SCALARS, CHOICES, PATTERNS, ARRAYS, OBJECTS, CHOICES_OF_SCHEMAS, REFERENCES) for pair in group
)
"""By name."""
