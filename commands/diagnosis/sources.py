"""What a plugin's source says: read and parsed, never imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

import dovetail
from dovetail.commands.diagnosis.finding import Finding, finding, reference_remedy
from dovetail.commands.diagnosis.installation import extra_of
from dovetail.commands.diagnosis.surface import is_ours
from dovetail.commands.summary import find_module
from dovetail.registry.contents import siblings
from dovetail.registry.entries import HOOKS_KIND, Entry

_EXPORTED = frozenset(f"{dovetail.__name__}.{name}" for name in dovetail.__all__)
"""Names of the package itself, which it imports on first use."""

_COMPOUND = (
    *(ast.Module, ast.If, ast.Try, ast.TryStar, ast.With, ast.For, ast.While, ast.Match),
    *(ast.ExceptHandler, ast.match_case, ast.withitem),
)
"""What has statements of the module's own top within."""


@dataclass(frozen=True)
class Import:
    """An import statement, or one name of it; or the use of a name of `dovetail`, which imports it."""

    module: str
    name: str | None
    """The name in `from module import name`; None for `import module`."""
    line: int
    is_certain: bool
    """Whether it runs whenever the module is imported: at the top, outside of `try` and `if`."""
    piece: ast.AST
    """The one of the module's `pieces` that it is, or is in."""
    bound: str = ""
    """The name that it gives; none where it is no statement, and for `*`."""
    is_whole: bool = True
    """Whether `bound` means all of it: `import a.b` binds a."""


@dataclass(frozen=True)
class Source:
    """One module of a plugin's code."""

    module: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]


def examine_source(entry: Entry, *, is_brief: bool = False) -> Iterator[Finding]:
    """Findings about the modules of a plugin, from its source alone. A module without Python source has none.
    `is_brief`: only whether the module is there."""
    module, attribute = parts_of(entry.reference)
    if module.endswith(".py"):
        if not Path(module).is_file():
            yield finding("module-gone", entry.label, f"{entry.label}: there is no file {module}")
            return
    elif find_module(module) is None:
        remedy = reference_remedy("module-gone", entry)
        yield finding("module-gone", entry.label, f"{entry.label}: there is no module '{module}'", remedy)
        return
    if is_brief:
        return
    sources = reached(module)
    if sources and attribute and _surely_lacks(sources[0].tree, attribute.partition(".")[0]):
        yield finding("class-gone", entry.label, f"{entry.label}: {module} has no '{attribute}'")
    yield from _missing_modules(entry, sources)


def parts_of(reference: str) -> tuple[str, str]:
    """Module or file, and what is meant of it: nothing for hooks that are a module."""
    module, colon, attribute = reference.rpartition(":")
    return (module, attribute) if colon else (reference, "")


@cache
def reached(module: str) -> tuple[Source, ...]:
    """The module of a plugin, or its file, and the modules of the same package (or beside the file) that it imports,
    directly or not."""
    if module.endswith(".py"):
        path = Path(module)
        named = {path.stem: path, **siblings(path)}
        found = [_read(name, file) for name, file in named.items()]
        return tuple(source for source in found if source is not None)
    sources: dict[str, Source | None] = {}
    to_read = [module]
    while to_read:
        name = to_read.pop()
        if name in sources:
            continue
        sources[name] = source = _source_of(name)
        for one in source.imports if source is not None else ():
            for target in (one.module, f"{one.module}.{one.name}" if one.name else one.module):
                if unit_of(target) == unit_of(module):
                    to_read.append(target)
    return tuple(source for source in sources.values() if source is not None)


@cache
def find_once(module: str) -> ModuleSpec | None:
    return find_module(module)


def unit_of(module: str) -> str:
    """The package whose parts know each other: a top-level one, and of Dovetail's own each folder."""
    return ".".join(module.split(".")[: 2 if is_ours(module) else 1])


@cache
def _source_of(module: str) -> Source | None:
    spec = find_once(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return _read(module, Path(spec.origin))


def _read(module: str, path: Path) -> Source | None:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    is_package = path.name == "__init__.py"
    certain = set(map(id, tree.body))
    imports = [
        one
        for piece in pieces(tree)
        for node in ast.walk(piece)
        for one in _imports(node, piece, module, is_package, id(node) in certain)
    ]
    return Source(module, path, tree, tuple(imports))


def pieces(node: ast.AST) -> Iterator[ast.AST]:
    """What is at the top of a module: its statements, and of `if`, `try` and the like those within, and the
    expressions of their heads."""
    if isinstance(node, _COMPOUND):
        for child in ast.iter_child_nodes(node):
            yield from pieces(child)
    else:
        yield node


def _imports(node: ast.AST, piece: ast.AST, module: str, is_package: bool, is_certain: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            yield Import(alias.name, None, node.lineno, is_certain, piece, bound, alias.asname is not None)
    elif isinstance(node, ast.ImportFrom):
        target = node.module or ""
        if node.level:
            parts = module.split(".")
            package = parts[: len(parts) - node.level + is_package]
            target = ".".join([*package, *([target] if target else [])])
        for alias in node.names:
            bound = "" if alias.name == "*" else alias.asname or alias.name
            yield Import(target, alias.name, node.lineno, is_certain, piece, bound)
    elif isinstance(node, ast.Attribute) and ast.unparse(node) in _EXPORTED:
        yield Import(dovetail.__name__, node.attr, node.lineno, False, piece)


def _surely_lacks(tree: ast.Module, name: str) -> bool:
    """Whether a module cannot have `name`: nothing in it defines, imports or makes names on demand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name in (
            name,
            "__getattr__",
        ):
            return False
        if isinstance(node, ast.alias) and (node.asname or node.name.partition(".")[0]) in (name, "*"):
            return False
        if isinstance(node, ast.Name) and (
            node.id in ("globals", "vars", "exec", "setattr") or (isinstance(node.ctx, ast.Store) and node.id == name)
        ):
            return False
    return True


def _missing_modules(entry: Entry, sources: tuple[Source, ...]) -> Iterator[Finding]:
    """Modules that the import needs and that are not here, where an extra brings them."""
    if entry.distribution is None or entry.kind == HOOKS_KIND:
        return
    certain = {one.module for source in _imported_first(sources) for one in source.imports if one.is_certain}
    for top in sorted({module.partition(".")[0] for module in certain}):
        if find_module(top) is not None:
            continue
        try:
            extra = extra_of(entry.distribution, top)
        except metadata.PackageNotFoundError:
            return
        if extra is not None:
            wish = f'pip install "{entry.distribution}[{extra}]"'
            message = f"{entry.label} needs the module '{top}', which is not installed here"
            yield finding("missing-extra", entry.label, message, wish)


def _imported_first(sources: tuple[Source, ...]) -> Iterator[Source]:
    """Of the modules that are reached those that the import of the first surely brings."""
    by_name = {source.module: source for source in sources}
    to_see = [sources[0].module] if sources else []
    seen: set[str] = set()
    while to_see:
        name = to_see.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        yield by_name[name]
        for one in by_name[name].imports:
            if one.is_certain:
                to_see += [one.module, f"{one.module}.{one.name}"]
