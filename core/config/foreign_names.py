"""Another project's names for settings, as keywords of `LLM(...)` and as command-line flags.

A package that has such names lists them by the entry point `dovetail.config_names`: each says what it is called here,
or why it is not taken. What is not taken is refused with that reason, unless the value asks for what happens anyway.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import Any, Final, Literal

from dovetail.config.tree import KeyPath, nearest
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kinds import CONFIG_NAMES_GROUP

Status = Literal["works", "planned", "refused"]
ValueType = Literal["str", "strs", "int", "float", "json", "switch"]


VALUE: Final = object()
"""In `ForeignName.sink`, what the name is given."""


@dataclass(frozen=True)
class ForeignName:
    """A name of another project's."""

    name: str
    """As a keyword: "tensor_parallel_size"."""
    type: ValueType
    """What the flag takes. "strs": one text or several; "switch": nothing, and there is a `--no-` form."""
    status: Status
    key: str | None = None
    """Dotted config key that it sets."""
    note: str = ""
    """Why it is not taken, or a remark."""
    instead: str = ""
    """Of a name that is not taken: what to do in its place."""
    also: tuple[str, ...] = ()
    """Further keys that get the same value."""
    along: Mapping[str, Any] = field(default_factory=dict)
    """Further keys that come with it, with values of their own."""
    meanings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values that set other keys: value -> these keys with their values."""
    sink: Mapping[str, Any] = field(default_factory=dict)
    """Of a name that adds to the list of telemetry sinks: the sink's name and options, `VALUE` for what is given."""
    values: Mapping[str | bool, Any] = field(default_factory=dict)
    """Its values that are called otherwise here."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Values that are not taken, with the reason, of a name that works otherwise."""
    no_effect: tuple[Any, ...] = ()
    """Values that ask for what happens anyway."""
    entries: Mapping[str, str] = field(default_factory=dict)
    """Of a name that takes entries, each as `NAME=VALUE` or as JSON with `name` and these fields: the mapping in which
    the field's value is put under the entry's name, for each field. The first is the one that `VALUE` gives."""
    factor: float = 1.0
    """What a number is multiplied by: the key may count in another unit."""
    parts: Mapping[str, ForeignName] = field(default_factory=dict)
    """Of a name that takes a mapping: what each key of it means. Then `key` is None."""
    implied: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """A key of the mapping that brings another with it, where that is left out: key -> (the other, its value)."""

    @property
    def flag(self) -> str:
        """As a flag: "--tensor-parallel-size"."""
        return "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str | None:
        """The form that switches off, where there is one."""
        return "--no-" + self.name.replace("_", "-") if self.type == "switch" else None

    @property
    def refusal(self) -> str:
        """Of a name that is not taken: why not, and what to do."""
        return f"{self.note}; {self.instead}"

    def translate(self, value: Any, text: str) -> list[tuple[KeyPath, Any]]:
        """The config keys and values that `value` stands for; none where it changes nothing.

        `text` is what messages call this use of the name. None counts as not given. Of a name that adds a telemetry
        sink the value is that one sink.
        Raises `ConfigError` for names and values that are not taken.
        """
        if value is None or any(_is_same(value, same) for same in self.no_effect):
            return []
        if self.parts:
            return self._translate_parts(_parse_json(value, text) if isinstance(value, str) else value, text)
        if self.entries:
            return self._translate_entries(value, text)
        if self.status != "works" or self.key is None:
            raise ConfigError(f"{text}={value!r} is {self.status}: {self.refusal}")
        if isinstance(value, str) and value in self.refuses:
            raise ConfigError(f"{text}={value!r} is refused: {self.refuses[value]}")
        if isinstance(value, str) and self.type == "json":
            value = _parse_json(value, text)
        elif isinstance(value, str | bool):
            value = self.values.get(value, value)
        elif self.factor != 1.0 and isinstance(value, int | float):
            value = value * self.factor
        if isinstance(value, str) and value in self.meanings:
            return [(tuple(key.split(".")), meant) for key, meant in self.meanings[value].items()]
        if self.sink:
            value = {option: value if given is VALUE else given for option, given in self.sink.items()}
        pairs = {**dict.fromkeys((self.key, *self.also), value), **self.along}
        return [(tuple(key.split(".")), given) for key, given in pairs.items()]

    def _translate_parts(self, value: Any, text: str) -> list[tuple[KeyPath, Any]]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{text} must be a mapping with keys of {', '.join(self.parts)}, got {value!r}")
        given = dict(value)
        for name, (other, implied) in self.implied.items():
            if given.get(name) is not None and given.get(other) is None:
                given[other] = implied
        translated: list[tuple[KeyPath, Any]] = []
        for name, item in given.items():
            if name not in self.parts:
                raise ConfigError(f"{text}: unknown key {name!r}: {nearest(str(name), self.parts)}")
            translated += self.parts[name].translate(item, f"{text}.{name}")
        return translated

    def _translate_entries(self, value: Any, text: str) -> list[tuple[KeyPath, Any]]:
        translated: list[tuple[KeyPath, Any]] = []
        seen: set[str] = set()
        for item in [value] if isinstance(value, str | Mapping) else value:
            entry = self._entry(item, text)
            name = entry.pop("name")
            if name in seen:
                raise ConfigError(f"{text}: {name!r} is given twice: keep one")
            seen.add(name)
            translated += [((*self.entries[key].split("."), name), part) for key, part in entry.items()]
        return translated

    def _entry(self, item: Any, text: str) -> dict[str, str]:
        """One entry by its fields, `name` among them."""
        required, given = next(iter(self.entries)), item
        if isinstance(item, str) and not item.lstrip().startswith("{"):
            name, _, value = item.partition("=")
            item = {"name": name, required: value}
        elif isinstance(item, str):
            item = _parse_json(item, text)
        known = ("name", *self.entries)
        found = {key: part for key, part in item.items() if part is not None} if isinstance(item, Mapping) else {}
        for key, part in found.items():
            if key not in known:
                raise ConfigError(f"{text}: unknown key {key!r}: {nearest(str(key), known)}")
            if not isinstance(part, str):
                raise ConfigError(f"{text}: {key} must be text, got {part!r}")
        if not (found.get("name") and found.get(required)):
            raise ConfigError(
                f'{text}: {given!r} must be NAME={required.upper()}, or JSON with "name" and "{required}"'
            )
        return found


@dataclass(frozen=True)
class Project:
    """A project whose names are known."""

    title: str
    """As messages call it: "vLLM"."""
    names: Mapping[str, ForeignName]
    """By keyword."""


@lru_cache(maxsize=1)
def projects() -> tuple[Project, ...]:
    """What the installed packages list under `dovetail.config_names`; one that is gone from disk lists nothing."""
    found = []
    for point in metadata.entry_points(group=CONFIG_NAMES_GROUP):
        try:
            found.append(Project(point.name, point.load()))
        except ImportError:
            continue
    return tuple(found)


def project_of(name: str) -> Project | None:
    """The project that knows `name` as a keyword."""
    return next((project for project in projects() if name in project.names), None)


def foreign_names() -> Mapping[str, ForeignName]:
    """All names of all projects, by keyword; of equal ones the first project's."""
    return {name: entry for project in reversed(projects()) for name, entry in project.names.items()}


def hint(word: str, known: Iterable[str], section: str = "") -> str:
    """For an unknown key: what became of another project's name, if it is one, or else the nearest known keys.
    `section`: where the key is, dotted. A drafter that has a `path` of its own means that by "model", not `model.path`.
    """
    known = list(known)
    project = project_of(word)
    if project is None:
        return nearest(word, known)
    name = project.names[word]
    if name.status == "works" and name.key is not None:
        last = name.key.rpartition(".")[2]
        place = f"{section}.{last}" if section and last != "name" and last in known else name.key
        return f"{project.title}'s {word} is {place} here"
    return f"{project.title}'s {word} is {name.status}: {name.refusal}" if name.instead else nearest(word, known)


def works(name: str, type_: ValueType, key: str, note: str = "", **more: Any) -> ForeignName:
    """A name that sets a key."""
    return ForeignName(name, type_, "works", key, note, **more)


def planned(name: str, type_: ValueType, note: str, instead: str, *no_effect: Any) -> ForeignName:
    """A name that is refused for now, unless its value asks for what happens anyway."""
    return ForeignName(name, type_, "planned", note=note, instead=instead, no_effect=no_effect)


def refused(name: str, type_: ValueType, note: str, instead: str, *no_effect: Any) -> ForeignName:
    """A name that is refused for good, unless its value asks for what happens anyway."""
    return ForeignName(name, type_, "refused", note=note, instead=instead, no_effect=no_effect)


def _is_same(value: Any, same: Any) -> bool:
    """Whether they are equal, and True is not 1."""
    return value is same or (isinstance(value, bool) == isinstance(same, bool) and bool(value == same))


def _parse_json(value: str, text: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{text}: {value[:80]!r} is not JSON ({error})") from error
