"""What a change of a function's parameters and results breaks.

Whoever calls a function is content where it takes more and returns less than before. Whoever overrides one is called by
the host, and so sees every change from the other side: what the caller may pass now, the override does not take.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import griffe
from surface_change import BOTH, CALLERS, IMPLEMENTERS, KEEP, NEW_NAME, NOBODY, OPTIONAL, Change, canonical

_POSITIONAL = (griffe.ParameterKind.positional_only, griffe.ParameterKind.positional_or_keyword)
_VARIADIC = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)


def compare_signatures(path: str, was: griffe.Function, now: griffe.Function, is_overridden: bool) -> Iterator[Change]:
    """Changes of parameters and of what is returned. Hooks are called by name, so they may get parameters."""
    is_hook = any("hookspec" in str(decorator.value) for decorator in now.decorators)
    if ("async" in was.labels) is not ("async" in now.labels):
        yield Change(path, "async changed", BOTH, "it is awaited, or not, in another way")
    before, after = ({p.name: p for p in each.parameters} for each in (was, now))
    for name in before.keys() - after.keys():
        whom = BOTH if is_overridden or is_hook else CALLERS
        yield Change(path, f"parameter '{name}' was removed or renamed", whom, "it is passed, or taken, by name", KEEP)
    for name in after.keys() - before.keys():
        if is_hook:
            yield Change(path, f"parameter '{name}' was added")
        else:
            yield _added_parameter(path, after[name], is_overridden)
    for name in before.keys() & after.keys():
        yield from _compare_parameters(path, before[name], after[name], is_overridden)
    kept = [name for name, p in before.items() if p.kind in _POSITIONAL and name in after]
    if [name for name, p in after.items() if p.kind in _POSITIONAL][: len(kept)] != kept and not is_hook:
        why = "arguments that are passed by position arrive as others"
        yield Change(path, "parameters changed their order", BOTH if is_overridden else CALLERS, why, "append new ones")
    types = _Types("returns", was.returns, now.returns)
    yield from types.compare(path, is_overridden, is_fine=types.is_narrower)


def _added_parameter(path: str, parameter: griffe.Parameter, is_overridden: bool) -> Change:
    if parameter.default is None and parameter.kind not in _VARIADIC:
        whom = BOTH if is_overridden else CALLERS
        return Change(path, f"required parameter '{parameter.name}' is new", whom, "nobody passes it yet", OPTIONAL)
    if is_overridden:
        why = "the host may pass it, and existing overrides do not take it"
        instead = "put it into a record that is passed already, as a field with a default"
        return Change(path, f"parameter '{parameter.name}' is new", IMPLEMENTERS, why, instead)
    return Change(path, f"optional parameter '{parameter.name}' was added")


def _compare_parameters(
    path: str, was: griffe.Parameter, now: griffe.Parameter, is_overridden: bool
) -> Iterator[Change]:
    name = f"parameter '{was.name}'"
    if was.kind is not now.kind:
        what = f"{name} was {was.kind.value}, is {now.kind.value}"
        yield Change(path, what, BOTH if is_overridden else CALLERS, "calls pass it in the old way")
    if was.kind not in _VARIADIC and canonical(was.default) != canonical(now.default):
        what = f"{name}: the default was {was.default}, is {now.default}"
        if was.default is not None:
            why = "calls that leave it out mean something else, or fail"
            yield Change(path, what, BOTH if is_overridden else CALLERS, why, NEW_NAME)
        elif is_overridden:
            yield Change(path, what, IMPLEMENTERS, "calls may leave it out, and existing overrides require it")
        else:
            yield Change(path, f"{name} has a default: {now.default}")
    types = _Types(name, was.annotation, now.annotation)
    yield from types.compare(path, is_overridden, is_fine=types.is_wider)


class _Types:
    """An annotation before and after."""

    def __init__(self, name: str, was: griffe.Expr | str | None, now: griffe.Expr | str | None):
        self._was, self._now = canonical(was), canonical(now)
        texts = (was, now) if str(was) != str(now) else (self._was, self._now)
        self._what = f"{name}: the annotation was {texts[0]}, is {texts[1]}"

    @property
    def is_wider(self) -> bool:
        """Whether all that was allowed is allowed."""
        return self._now != "" and _alternatives(self._was) <= _alternatives(self._now)

    @property
    def is_narrower(self) -> bool:
        """Whether nothing is allowed that was not."""
        return self._was == "" or (self._now != "" and _alternatives(self._was) >= _alternatives(self._now))

    def compare(self, path: str, is_overridden: bool, is_fine: bool) -> Iterator[Change]:
        """`is_fine`: callers are content with the change."""
        if self._was == self._now:
            return
        if is_fine or self._was == "":
            whom = IMPLEMENTERS if is_overridden and self._was else NOBODY
        else:
            whom = BOTH if is_overridden else CALLERS
        yield Change(path, self._what, whom, "values may be of a type that the other side does not expect", NEW_NAME)


def _alternatives(annotation: str) -> frozenset[str]:
    """The members of a union; of a Literal, its values."""

    def parts(node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.BinOp):
            yield from (*parts(node.left), *parts(node.right))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "typing.Literal":
            values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            yield from (f"Literal {ast.unparse(value)}" for value in values)
        else:
            yield ast.unparse(node)

    return frozenset(parts(ast.parse(annotation, mode="eval").body)) if annotation else frozenset()
