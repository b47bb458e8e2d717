"""What a plugin's source says about it, read without importing anything of it."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


def docstring_summary(reference: str) -> str | None:
    """First line of the docstring of the class that `reference` ("package.module:Class") names. None where the source
    is not to be found, is no Python, or has no docstring there."""
    module, _, attribute = reference.partition(":")
    try:
        spec = _find(module)
        if spec is None or spec.origin is None:
            return None
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            text = ast.get_docstring(node, clean=False)
            return inspect.cleandoc(text).partition("\n")[0] if text else None
    return None


def _find(module: str) -> ModuleSpec | None:
    """Where `module` would be loaded from. As `importlib.util.find_spec`, which would import the packages around it."""
    spec: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        path = spec.submodule_search_locations if spec is not None else None
        if spec is not None and path is None:
            return None
        found = (finder.find_spec(name, path, None) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return None
    return spec
