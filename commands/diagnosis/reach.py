"""What of a plugin's modules its class reaches: what it refers to by name, as the source says, and nothing that only
its neighbours use."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from dovetail.commands.diagnosis.sources import Import, Source, parts_of, pieces, reached
from dovetail.commands.diagnosis.surface import is_public

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_Path = tuple[str, ...]
"""The parts of a dotted name."""


@dataclass(frozen=True, eq=False)
class _Module:
    """One module, by the pieces at its top."""

    source: Source
    pieces: tuple[ast.AST, ...]
    defined: Mapping[str, tuple[ast.AST, ...]]
    """Name -> the pieces that bind it."""
    aliases: Mapping[str, _Path]
    """Name -> the other name that the module gives it for, as in `D = speculation.Draft`."""
    names: Mapping[str, _Path]
    """Name -> what is imported by it, anywhere in the module."""
    stars: tuple[str, ...]
    """Modules of which all names are imported."""
    imports: Mapping[int, tuple[Import, ...]]
    """`id` of a piece -> the imports in it."""


@dataclass(frozen=True, eq=False)
class Reach:
    """What a class uses of its own modules: what the import of them runs, the class, and what these refer to."""

    modules: Mapping[str, _Module]
    entered: tuple[str, ...]
    found: tuple[tuple[_Module, ast.AST], ...]

    def imports(self) -> Iterator[tuple[Source, Import]]:
        """Imports that the class brings about, those at the top of each module among them."""
        known = {id(piece) for _, piece in self.found}
        for name in self.entered:
            module = self.modules[name]
            for one in module.source.imports:
                if isinstance(one.piece, _IMPORTS) or id(one.piece) in known:
                    yield module.source, one

    def used(self) -> set[str]:
        """Public names of Dovetail that are imported, or read of a module; and of calls the keywords: "Class",
        "Class.member"."""
        used = {one.name for _, one in self.imports() if one.name is not None and is_public(one.module)}
        for module, piece in self.found:
            for node in ast.walk(piece):
                if isinstance(node, ast.Attribute):
                    used |= _public_names(self._meaning(module, node))
                elif isinstance(node, ast.Call):
                    called = self._meaning(module, node.func)
                    used |= {
                        name
                        for each in node.keywords
                        if called and each.arg is not None
                        for name in _public_names((*called, each.arg))
                    }
        return used

    def _meaning(self, module: _Module, node: ast.AST) -> _Path:
        path = _path(node)
        return _meaning(self.modules, module, path) if path else ()


@cache
def reach_of(reference: str) -> Reach:
    """What the class of a reference uses, surely. Of hooks that are a module: all of it."""
    name, root = _root(reference)
    modules = _modules(name)
    return _everything(modules) if not root else _walk(modules, name, root, _runs)


@cache
def widely(reference: str) -> Reach:
    """As `reach_of`, with what nobody refers to: functions that Python may call in other ways. Left out is what belongs
    to other classes alone."""
    name, root = _root(reference)
    modules = _modules(name)
    if not root or not _definition(modules, (*_module_name(name).split("."), root)):
        return _everything(modules)
    mine = {id(piece) for _, piece in _walk(modules, name, root, _runs).found}
    walk = _Walk(modules, lambda piece: False)
    for module in modules.values():
        for piece in module.pieces:
            if isinstance(piece, ast.ClassDef) and id(piece) not in mine:
                walk.add(module, piece)
    others = {id(piece) for _, piece in walk.found.values()} - mine

    def is_anybodys(piece: ast.AST) -> bool:
        return _runs(piece) or (not isinstance(piece, ast.ClassDef) and id(piece) not in others)

    return _walk(modules, name, root, is_anybodys)


def _root(reference: str) -> tuple[str, str]:
    """Module or file, and the name at its top; none for hooks that are a module."""
    module, attribute = parts_of(reference)
    return module, attribute.partition(".")[0]


def _module_name(module: str) -> str:
    """As imports name it: of a file its own name."""
    return module.replace("\\", "/").rpartition("/")[2].removesuffix(".py") if module.endswith(".py") else module


def _everything(modules: Mapping[str, _Module]) -> Reach:
    return Reach(
        modules, tuple(modules), tuple((module, piece) for module in modules.values() for piece in module.pieces)
    )


def _walk(modules: Mapping[str, _Module], name: str, root: str, is_anybodys: Callable[[ast.AST], bool]) -> Reach:
    walk = _Walk(modules, is_anybodys)
    start = _module_name(name)
    walk.enter(start)
    for module, piece in _definition(modules, (*start.split("."), root)):
        walk.add(module, piece)
    return Reach(modules, tuple(walk.entered), tuple(walk.found.values()))


class _Walk:
    """Follows names from a class to what they are bound to."""

    def __init__(self, modules: Mapping[str, _Module], is_anybodys: Callable[[ast.AST], bool]):
        self.modules, self.is_anybodys = modules, is_anybodys
        self.entered: dict[str, None] = {}
        self.found: dict[int, tuple[_Module, ast.AST]] = {}

    def enter(self, name: str) -> None:
        """An import of a module: runs what is at its top."""
        if name in self.entered or name not in self.modules:
            return
        self.entered[name] = None
        module = self.modules[name]
        for piece in module.pieces:
            if isinstance(piece, _IMPORTS):
                self._imports(module, piece)
            elif self.is_anybodys(piece):
                self.add(module, piece)

    def add(self, module: _Module, piece: ast.AST) -> None:
        """A piece, and all that it refers to but plugins of their own: these have a `contract` of their own."""
        to_see = [(module, piece)]
        while to_see:
            module, piece = to_see.pop()
            if id(piece) in self.found:
                continue
            self.found[id(piece)] = (module, piece)
            self._imports(module, piece)
            if isinstance(piece, ast.ClassDef):
                to_see += self._bases(module, piece)
            for node in ast.walk(piece):
                if isinstance(node, ast.Name | ast.Attribute):
                    to_see += [one for one in self._meant(module, node) if not self._is_plugin(*one)]

    def _imports(self, module: _Module, piece: ast.AST) -> None:
        for one in module.imports.get(id(piece), ()):
            self.enter(one.module)
            if one.name is not None:
                self.enter(f"{one.module}.{one.name}")

    def _meant(self, module: _Module, node: ast.AST) -> tuple[tuple[_Module, ast.AST], ...]:
        path = _path(node)
        return _definition(self.modules, _meaning(self.modules, module, path)) if path else ()

    def _bases(self, module: _Module, piece: ast.ClassDef) -> list[tuple[_Module, ast.AST]]:
        return [found for base in piece.bases for found in self._meant(module, base)]

    def _is_plugin(self, module: _Module, piece: ast.AST) -> bool:
        """Whether a class, or one that it derives from, declares a contract version."""
        to_see, seen = [(module, piece)], set[int]()
        while to_see:
            module, piece = to_see.pop()
            if not isinstance(piece, ast.ClassDef) or id(piece) in seen:
                continue
            if any("contract" in _bound(each) for each in piece.body if not isinstance(each, _DEFINITIONS)):
                return True
            seen.add(id(piece))
            to_see += self._bases(module, piece)
        return False


@cache
def _modules(name: str) -> Mapping[str, _Module]:
    return {source.module: _module(source) for source in reached(name)}


def _module(source: Source) -> _Module:
    top = tuple(pieces(source.tree))
    defined: dict[str, tuple[ast.AST, ...]] = {}
    aliases: dict[str, _Path] = {}
    for piece in top:
        if isinstance(piece, _IMPORTS):
            continue
        for name in _bound(piece):
            defined[name] = (*defined.get(name, ()), piece)
        if isinstance(piece, ast.Assign) and (path := _path(piece.value)):
            aliases |= dict.fromkeys(_bound(piece), path)
    names: dict[str, _Path] = {}
    imports: dict[int, tuple[Import, ...]] = {}
    for one in source.imports:
        imports[id(one.piece)] = (*imports.get(id(one.piece), ()), one)
        if one.bound:
            whole = one.module if one.name is None else f"{one.module}.{one.name}"
            # `import a.b` binds a.
            names[one.bound] = tuple(whole.split(".")) if one.is_whole else (one.bound,)
    stars = tuple(one.module for one in source.imports if one.name == "*")
    return _Module(source, top, defined, aliases, names, stars, imports)


def _bound(piece: ast.AST) -> list[str]:
    """Names that a piece binds."""
    if isinstance(piece, _DEFINITIONS):
        return [piece.name]
    return [node.id for node in ast.walk(piece) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _runs(piece: ast.AST) -> bool:
    """Whether a piece does something at the import beyond a definition, so that it concerns everybody."""
    if isinstance(piece, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = piece.targets if isinstance(piece, ast.Assign) else [piece.target]
        return any(isinstance(node, ast.Attribute | ast.Subscript) for each in targets for node in ast.walk(each))
    return not isinstance(piece, _DEFINITIONS)


def _path(node: ast.AST) -> _Path:
    """The parts of a name, or of an attribute of one; none of another expression."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return (node.id, *reversed(attributes)) if isinstance(node, ast.Name) else ()


def _meaning(
    modules: Mapping[str, _Module], module: _Module, path: _Path, seen: frozenset[tuple[str, str]] = frozenset()
) -> _Path:
    """What a name of a module is called outside of it, through imports and other names; nothing where it is neither
    defined nor imported."""
    here, first, rest = module.source.module, path[0], path[1:]
    if (here, first) in seen:
        return ()
    seen |= {(here, first)}
    if first in module.aliases and (found := _meaning(modules, module, module.aliases[first], seen)):
        return (*found, *rest)
    if first in module.defined:
        return (*here.split("."), *path)
    if first in module.names:
        whole = (*module.names[first], *rest)
        owner, inner = _split(modules, whole)
        return (inner and _meaning(modules, modules[owner], inner, seen)) or whole
    for star in module.stars:
        if star not in modules:
            if is_public(star):
                return (*star.split("."), *path)
        elif found := _meaning(modules, modules[star], path, seen):
            return found
    return ()


def _split(modules: Mapping[str, _Module], path: _Path) -> tuple[str, _Path]:
    """The module that a path begins with, of those given, and what follows."""
    for length in range(len(path) - 1, 0, -1):
        if (name := ".".join(path[:length])) in modules:
            return name, path[length:]
    return "", ()


def _definition(modules: Mapping[str, _Module], path: _Path) -> tuple[tuple[_Module, ast.AST], ...]:
    """The pieces that a path means; of one that its module only hands on, those of the other module."""
    owner, inner = _split(modules, path)
    if not inner:
        return ()
    module = modules[owner]
    if inner[0] in module.defined:
        return tuple((module, piece) for piece in module.defined[inner[0]])
    found = _meaning(modules, module, inner)
    return _definition(modules, found) if found and found != path else ()


def _public_names(path: _Path) -> set[str]:
    """Of a dotted path what follows a public module."""
    return {".".join(path[length:]) for length in range(1, len(path)) if is_public(".".join(path[:length]))}
