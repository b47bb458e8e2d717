"""Reads docstrings and class variables of a plugin from its source, without importing it."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path


def docstring_summary(reference: str) -> str | None:
    """First line of the docstring of the class that `reference` ("package.module:Class") names. None where the source
    is not to be found, is no Python, or has no docstring there."""
    _, found = _class_at(*reference.partition(":")[::2])
    text = ast.get_docstring(found, clean=False) if found is not None else None
    return inspect.cleandoc(text).partition("\n")[0] if text else None


def written_text(reference: str, name: str) -> str | None:
    """The string literal of the class variable `name`, of the class behind `reference` or the first of its bases that
    has one. None where the source is not found, or has no such literal."""
    module, _, attribute = reference.partition(":")
    for found in _lineage(module, attribute, frozenset()):
        for node in found.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                value = node.value.value if isinstance(node.value, ast.Constant) else None
                return value if isinstance(value, str) else None
    return None


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _lineage(module: str, name: str, seen: frozenset[tuple[str, str]]) -> Iterator[ast.ClassDef]:
    """A class and its bases, depth first, through imports of names (`from module import Base`)."""
    tree, found = _class_at(module, name)
    if tree is None or (module, name) in seen:
        return
    seen |= {(module, name)}
    if found is None:
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        yield from _lineage(node.module, alias.name, seen)
        return
    yield found
    for base in found.bases:
        if isinstance(base, ast.Name):
            yield from _lineage(module, base.id, seen)


def _class_at(module: str, name: str) -> tuple[ast.Module | None, ast.ClassDef | None]:
    """The source of `module`, and the class that it defines under `name`; None for what is not there."""
    try:
        spec = find_module(module)
        if spec is None or spec.origin is None:
            return None, None
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError):
        return None, None
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return tree, next(classes, None)


def find_module(module: str) -> ModuleSpec | None:
    """Where `module` would be loaded from. As `importlib.util.find_spec`, which would import the packages around it."""
    spec: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        path = spec.submodule_search_locations if spec is not None else None
        if spec is not None and path is None:
            return None
        found = (finder.find_spec(name, path, None) for finder in sys.meta_path)
        try:
            spec = next((one for one in found if one is not None), None)
        except ImportError:  # a finder that knows better where such a name is
            return None
        if spec is None:
            return None
    return spec
