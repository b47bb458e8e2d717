"""Compares locks: with each other, and with what is on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.config.resolved import Component, ResolvedConfig
from dovetail.config.tree import dotted, flatten, get
from dovetail.engine.locking.lock import (
    Lock,
    LockedCode,
    LockedModel,
    LockedPart,
    code_of,
    hook_parts,
    machine_facts,
    take_lock,
)
from dovetail.registry.bootstrap import component_contents
from dovetail.registry.entries import HOOKS_KIND
from dovetail.registry.loading import is_file_reference
from dovetail.registry.registry import Registry

_SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """One thing in which two runs, or a lock and a machine, are not the same."""

    subject: str
    """"distribution acme", "part scheduler", "model", "config cache.block_size", "torch"."""
    what: str
    """How they differ."""
    is_informative: bool = False
    """Whether it says nothing about the parts themselves: versions of libraries, the platform, values of the config."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.what}"


def compare_locks(first: Lock, second: Lock, names: tuple[str, str] = ("the first", "the second")) -> list[Difference]:
    """All in which two locks differ. `names`: how the differences call the two."""
    both = _Comparison(*names)
    return [*both.locks(first, second), *both.values(first.values, second.values), *both.facts(first, second)]


def compare_with_machine(
    lock: Lock, resolved: ResolvedConfig | None = None, registry: Registry | None = None
) -> list[Difference]:
    """In what this machine differs from a lock. With a resolved config its parts and models are compared too; without
    one the distributions of the lock and the installed hooks are, and the code of parts without a distribution where it
    is found (`uncompared_parts` are those where it is not). Large files of models are read where the lock has
    their content.

    Raises what `take_lock` raises.
    """
    registry = registry if registry is not None else Registry.scan()
    if resolved is None:
        chosen = {path: part for path, part in lock.parts.items() if part.kind != HOOKS_KIND}
        here = Lock(
            parts={path: _as_here(lock, path, part) for path, part in chosen.items()} | hook_parts(registry),
            distributions={name: code_of(name) for name in lock.distributions},
            models=lock.models,
            informative=machine_facts(lock.informative.get("device", "")),
        )
    else:
        here = take_lock(resolved, registry, whole_weights=_has_all_content(lock))
    both = _Comparison("the lock", "this machine")
    return [*both.locks(lock, here), *both.facts(lock, here)]


def uncompared_parts(lock: Lock) -> list[str]:
    """Paths of the parts that `compare_with_machine` does not compare without a resolved config: their code is of no
    distribution, and not at the place on this machine that the lock's config has."""
    return [path for path, part in lock.parts.items() if part.local is not None and _local_code(lock, path) is None]


def _as_here(lock: Lock, path: str, part: LockedPart) -> LockedPart:
    """A part of the lock with its code as it is on this machine, where it is found."""
    code = _local_code(lock, path) if part.local is not None else None
    return part if code is None else replace(part, local=code)


def _local_code(lock: Lock, path: str) -> LockedCode | None:
    """The code behind a part without a distribution as it is here: that of a file where the lock's config has it, that
    of a module on the path. None where it is not found."""
    part = lock.parts[path]
    reference = part.reference
    if is_file_reference(reference):
        # The part has no folder; the resolved config has one.
        section = get(lock.values, tuple(path.split(".")))
        reference = str(section.get("name")) if isinstance(section, Mapping) else ""
        if Path(reference).name != part.reference:
            return None
    contents = component_contents(Component(part.kind, part.name, reference))
    return LockedCode.of(contents, None) if contents.files else None


@dataclass(frozen=True)
class _Comparison:
    """What differs between two sides."""

    first: str
    second: str

    def locks(self, first: Lock, second: Lock) -> Iterator[Difference]:
        for path in _keys(first.parts, second.parts):
            yield from self.parts(f"part {path}", first.parts.get(path), second.parts.get(path))
        for name in _keys(first.distributions, second.distributions):
            one, other = first.distributions.get(name), second.distributions.get(name)
            yield from self.code(f"distribution {name}", one, other)
        for path in _keys(first.models, second.models):
            subject = "model" if path == "model" else f"model {path}"
            yield from self.models(subject, first.models.get(path), second.models.get(path))

    def parts(self, subject: str, first: LockedPart | None, second: LockedPart | None) -> Iterator[Difference]:
        if first is None or second is None:
            yield Difference(subject, self._missing(first))
            return
        for what in ("kind", "name", "reference", "distribution", "contract"):
            one, other = vars(first)[what], vars(second)[what]
            if one != other:
                yield Difference(subject, f"its {what} is {self._sides(one, other)}")
        if first.local is not None or second.local is not None:
            yield from self.code(subject, first.local, second.local)

    def code(self, subject: str, first: LockedCode | None, second: LockedCode | None) -> Iterator[Difference]:
        # A distribution that is not installed has no files.
        first = first if first is not None and first.files else None
        second = second if second is not None and second.files else None
        if first is None or second is None:
            if first is not second:
                yield Difference(subject, self._missing(first))
        elif first.version != second.version:
            yield Difference(subject, f"its version is {self._sides(first.version, second.version)}")
        elif first.sha256 != second.sha256:
            paths = [
                path for path in _keys(first.files, second.files) if first.files.get(path) != second.files.get(path)
            ]
            shown = [f"{path}{self._only(path, first.files, second.files)}" for path in paths[:_SHOWN]]
            more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
            same = f"the same version {first.version}, and " if first.version is not None else ""
            yield Difference(subject, f"{same}other files: {', '.join(shown)}{more}")

    def models(self, subject: str, first: LockedModel | None, second: LockedModel | None) -> Iterator[Difference]:
        if first is None or second is None:
            yield Difference(subject, self._missing(first))
            return
        if first.config != second.config:
            yield Difference(subject, "it has another config")
        if first.tensors != second.tensors:
            yield Difference(subject, "its tensors have other names, dtypes or shapes")
        for name in _keys(first.files, second.files):
            one, other = first.files.get(name), second.files.get(name)
            if one is None or other is None:
                yield Difference(subject, f"its file {name} is {self._missing(one)}")
            elif one != other:
                yield Difference(subject, f"its file {name} is {self._sides(_brief(one), _brief(other))}")

    def values(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
        one, other = ({dotted(path): value for path, value in flatten(dict(each))} for each in (first, second))
        for key in _keys(one, other):
            if one.get(key) != other.get(key):
                yield Difference(f"config {key}", self._sides(repr(one.get(key)), repr(other.get(key))), True)

    def facts(self, first: Lock, second: Lock) -> Iterator[Difference]:
        for name in _keys(first.informative, second.informative):
            one, other = first.informative.get(name), second.informative.get(name)
            if one != other:
                yield Difference(name, self._sides(one or "absent", other or "absent"), True)

    def _sides(self, first: object, second: object) -> str:
        return f"{first} in {self.first}, {second} in {self.second}"

    def _missing(self, first: object | None) -> str:
        return f"missing in {self.first if first is None else self.second}"

    def _only(self, path: str, first: Mapping[str, str], second: Mapping[str, str]) -> str:
        return "" if path in first and path in second else f" ({self._missing(first.get(path))})"


def _has_all_content(lock: Lock) -> bool:
    """Whether the lock has the content of every file of its models."""
    identities = [identity for model in lock.models.values() for identity in model.files.values()]
    return all(identity.startswith("sha256:") for identity in identities)


def _brief(identity: str) -> str:
    kind, _, text = identity.partition(":")
    return f"{text} bytes" if kind == "size" else f"{kind} {text[:12]}"


def _keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return sorted({*first, *second})
