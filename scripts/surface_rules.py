"""What a change of the public surface breaks, and whom: callers (who call, read or construct) or implementers (who
subclass, and are called by the host). What breaks nobody is an addition."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import griffe
from surface_change import BOTH, CALLERS, IMPLEMENTERS, KEEP, NEW_NAME, OPTIONAL, Change, canonical
from surface_signatures import compare_signatures


class Surfaces:
    """All modules of one version of the surface."""

    def __init__(self, modules: Mapping[str, griffe.Module], host_only: frozenset[str] = frozenset()):
        self.modules = modules
        self._host_only = host_only

    def names(self, module: str) -> dict[str, griffe.Object | griffe.Alias]:
        """The public names of a module."""
        members = self.modules[module].members
        exports = self.modules[module].exports
        if exports is not None:
            return {str(name): members[str(name)] for name in exports}
        return {name: member for name, member in members.items() if not member.is_alias}

    def find(self, path: str) -> griffe.Object | None:
        """The recorded object of that path."""
        module, _, name = path.rpartition(".")
        found = self.modules[module].members.get(name) if module in self.modules else None
        return self.find(found.target_path) if isinstance(found, griffe.Alias) else found

    def exports(self, module: str, path: str) -> bool:
        """Whether the module hands on the name of another one."""
        members = self.names(module).values()
        return any(isinstance(member, griffe.Alias) and member.target_path == path for member in members)

    def reached_from(self, path: str) -> set[str]:
        """The recorded names to which the annotations and bases of a class lead, itself included."""
        reached, waiting = set(), [path]
        while waiting:
            found = self.find(waiting.pop())
            if found is not None and found.path not in reached:
                reached.add(found.path)
                waiting.extend(_named_in(found))
        return reached

    def ancestors(self, cls: griffe.Class) -> Iterator[str]:
        """Paths of the class and of all that it derives from, as far as the surface shows them."""
        yield cls.path
        for base in cls.bases:
            path = canonical(base)
            found = self.find(path)
            yield from self.ancestors(found) if isinstance(found, griffe.Class) else [path.partition("[")[0]]

    def is_subclassed(self, cls: griffe.Class) -> bool:
        """Whether others than the host implement it: abstract classes, protocols and suites."""
        if cls.path in self._host_only:
            return False
        ancestors = [self.find(path) for path in self.ancestors(cls)]
        return any(isinstance(each, griffe.Class) and _is_open(each) for each in ancestors)


def _named_in(found: griffe.Object) -> Iterator[str]:
    """Paths of all that its annotations, bases and values name."""
    expressions: list[griffe.Expr | str | None] = []
    if isinstance(found, griffe.Class):
        expressions += found.bases
        for member in found.members.values():
            if not member.is_alias:
                yield from _named_in(member)
    elif isinstance(found, griffe.Function):
        expressions += [found.returns, *(parameter.annotation for parameter in found.parameters)]
    elif isinstance(found, griffe.Attribute):
        expressions += [found.annotation, found.value]
    for expression in expressions:
        yield from re.findall(r"\w+(?:\.\w+)+", canonical(expression))


def compare(old: Surfaces, new: Surfaces) -> Iterator[Change]:
    """All changes from `old` to `new`."""
    for module in sorted({*old.modules, *new.modules}):
        before = old.names(module) if module in old.modules else {}
        after = new.names(module) if module in new.modules else {}
        for name in before.keys() - after.keys():
            yield Change(f"{module}.{name}", "removed or renamed", BOTH, "the name cannot be imported any more", KEEP)
        for name in after.keys() - before.keys():
            yield Change(f"{module}.{name}", "added")
        for name in sorted(before.keys() & after.keys()):
            yield from _compare_named(old, new, f"{module}.{name}", before[name], after[name])


def _compare_named(
    old: Surfaces, new: Surfaces, path: str, before: griffe.Object | griffe.Alias, after: griffe.Object | griffe.Alias
) -> Iterator[Change]:
    if isinstance(before, griffe.Alias) and isinstance(after, griffe.Alias) and before.target_path == after.target_path:
        return  # compared where it is defined
    was, now = (
        surfaces.find(member.target_path) if isinstance(member, griffe.Alias) else member
        for surfaces, member in ((old, before), (new, after))
    )
    if isinstance(was, griffe.Class) and isinstance(now, griffe.Class):
        yield from _compare_classes(old, new, path, was, now)
    elif was is not None and now is not None:
        yield from _compare_members(path, was, now, is_overridden=False)


def _compare_classes(old: Surfaces, new: Surfaces, path: str, was: griffe.Class, now: griffe.Class) -> Iterator[Change]:
    bases = {*map(canonical, now.bases), *new.ancestors(now)}
    for base in was.bases:
        if canonical(base) not in bases:
            yield Change(path, f"no longer derives from {base}", BOTH, "isinstance and inherited members fail")
    yield from _compare_decorators(path, was, now)
    is_open = new.is_subclassed(now)
    for name in was.members.keys() - now.members.keys():
        if not _inherits(new, now, name):
            yield Change(f"{path}.{name}", "removed or renamed", BOTH, "what uses or implements it fails", KEEP)
    for name in now.members.keys() - was.members.keys():
        if not _inherits(old, was, name):
            yield _added(new, now, f"{path}.{name}", now.members[name], is_open)
    yield from _compare_field_order(new, path, was, now)
    for name in sorted(was.members.keys() & now.members.keys()):
        yield from _compare_members(f"{path}.{name}", was.members[name], now.members[name], is_open)


def _inherits(surfaces: Surfaces, cls: griffe.Class, name: str) -> bool:
    ancestors = (surfaces.find(path) for path in surfaces.ancestors(cls))
    return any(isinstance(each, griffe.Class) and name in each.members for each in ancestors if each is not cls)


def _added(new: Surfaces, cls: griffe.Class, path: str, member: griffe.Object | griffe.Alias, is_open: bool) -> Change:
    """A member that the class did not have before."""
    is_declared = isinstance(member, griffe.Attribute) and _is_required(member) and "property" not in member.labels
    if is_open and (_is_abstract(member) or _is_protocol(cls) or (is_declared and _is_class_var(member))):
        what = "a member that implementations must have is new"
        return Change(path, what, IMPLEMENTERS, "existing implementations lack it", "give it a default in the base")
    if is_declared and _has_fields(new, cls) and not _is_class_var(member):
        return Change(path, "a required field is new", CALLERS, "who constructs it does not pass it", OPTIONAL)
    if any(canonical(base).endswith("NamedTuple") for base in cls.bases):
        return Change(path, "the tuple has one more item", CALLERS, "who unpacks it gets too many values", NEW_NAME)
    return Change(path, "added")


def _is_open(cls: griffe.Class) -> bool:
    is_abc = any(canonical(base) == "abc.ABC" for base in cls.bases) or any(map(_is_abstract, cls.members.values()))
    return is_abc or _is_protocol(cls) or cls.name.endswith("Suite")


def _is_protocol(cls: griffe.Class) -> bool:
    return any(canonical(base).partition("[")[0] == "typing.Protocol" for base in cls.bases)


def _is_abstract(member: griffe.Object | griffe.Alias) -> bool:
    return "abstractmethod" in member.labels


def _is_class_var(member: griffe.Object | griffe.Alias) -> bool:
    return "class-attribute" in member.labels and "instance-attribute" not in member.labels


def _is_required(attribute: griffe.Attribute) -> bool:
    """Whether it has no default: no value, or a `field(...)` that gives none."""
    if isinstance(attribute.value, griffe.ExprCall) and str(attribute.value.function) in ("field", "Field"):
        named = {argument.name for argument in attribute.value.arguments if isinstance(argument, griffe.ExprKeyword)}
        return len(named) == len(attribute.value.arguments) and not named & {"default", "default_factory", "init"}
    return attribute.value is None


def _has_fields(surfaces: Surfaces, cls: griffe.Class) -> bool:
    """Whether its annotated attributes are arguments of its constructor: dataclasses and pydantic models."""
    return "dataclass" in cls.labels or "pydantic.BaseModel" in surfaces.ancestors(cls)


def _compare_decorators(path: str, was: griffe.Object, now: griffe.Object) -> Iterator[Change]:
    before, after = (
        {str(d.value) for d in each.decorators if "abstractmethod" not in str(d.value)}
        if isinstance(each, griffe.Class | griffe.Function)
        else set()
        for each in (was, now)
    )
    if before != after:
        what = f"decorators were {sorted(before)}, are {sorted(after)}"
        yield Change(path, what, BOTH, "it is constructed, called or subclassed in another way")


def _compare_field_order(new: Surfaces, path: str, was: griffe.Class, now: griffe.Class) -> Iterator[Change]:
    if "dataclass" not in now.labels or any("kw_only=True" in str(d.value) for d in now.decorators):
        return
    before, after = (
        [n for n, m in cls.members.items() if m.is_attribute and "property" not in m.labels and not _is_class_var(m)]
        for cls in (was, now)
    )
    kept = [name for name in before if name in after]
    if after[: len(kept)] != kept:
        why = "fields that are passed by position arrive as others"
        yield Change(path, "fields changed their order", CALLERS, why, "append new fields, or make all keyword-only")


def _compare_members(
    path: str, was: griffe.Object | griffe.Alias, now: griffe.Object | griffe.Alias, is_overridden: bool
) -> Iterator[Change]:
    if was.kind is not now.kind:
        yield Change(path, f"was a {was.kind.value}, is a {now.kind.value}", BOTH, "it is used in another way")
        return
    if not _is_abstract(was) and _is_abstract(now):
        yield Change(path, "became abstract", IMPLEMENTERS, "those that inherited it cannot be created any more")
    elif _is_abstract(was) and not _is_abstract(now):
        yield Change(path, "need not be implemented any more")
    if isinstance(was, griffe.Function) and isinstance(now, griffe.Function):
        yield from _compare_decorators(path, was, now)
        yield from compare_signatures(path, was, now, is_overridden)
    elif isinstance(was, griffe.Attribute) and isinstance(now, griffe.Attribute):
        yield from _compare_attributes(path, was, now)


def _compare_attributes(path: str, was: griffe.Attribute, now: griffe.Attribute) -> Iterator[Change]:
    before, after = canonical(was.annotation), canonical(now.annotation)
    if before == "None" and after.endswith(" | None"):
        yield Change(path, f"was reserved, and may be {now.annotation}")
    elif before != after and before not in ("", "..."):
        what = f"the annotation was {was.annotation}, is {now.annotation}"
        yield Change(
            path, what, BOTH, "who reads it meets, or who sets it passes, what the other does not expect", NEW_NAME
        )
    elif before != after:
        yield Change(path, f"is annotated: {now.annotation}")
    if was.labels & {"property"} != now.labels & {"property"} or _is_class_var(was) is not _is_class_var(now):
        yield Change(path, f"was {_sort(was)}, is {_sort(now)}", BOTH, "it is set in another way")
    elif canonical(was.value) != canonical(now.value):
        yield from _compare_values(path, was, now)


def _sort(attribute: griffe.Attribute) -> str:
    return "a property" if "property" in attribute.labels else "a ClassVar" if _is_class_var(attribute) else "a field"


def _compare_values(path: str, was: griffe.Attribute, now: griffe.Attribute) -> Iterator[Change]:
    if _is_required(was) and not _is_required(now):
        yield Change(path, f"has a default: {now.value}")
    elif _is_required(now) and not _is_required(was):
        yield Change(path, f"the default {was.value} is gone", BOTH, "who relied on it gives no value", OPTIONAL)
    else:
        why = "who relied on the value, or stored it, gets another"
        yield Change(path, f"the value was {was.value}, is {now.value}", BOTH, why, NEW_NAME)
