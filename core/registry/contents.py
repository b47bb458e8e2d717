"""What a plugin's code is: a hash of every file of its distribution, however that is installed, or of a local file and
those beside it that it imports."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from dovetail.registry.entries import OWN_DISTRIBUTION

_ENTRY_POINTS = "entry_points.txt"
_OWN_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Contents:
    """The files of a distribution that can be imported or read as data, and its entry points."""

    files: Mapping[str, str]
    """Path as in a wheel ("package/module.py") -> SHA-256 in hexadecimal, sorted by path."""
    in_place: bool = False
    """Whether it is installed in place, from a source tree (`pip install -e`)."""
    edited: tuple[str, ...] = ()
    """Files whose content is not what the installer recorded."""
    missing: tuple[str, ...] = ()
    """Files that the installer recorded and that are gone."""

    @property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) over paths and contents. The same for a wheel and for the tree that it was built of,
        where the tree has no other files in its packages."""
        lines = (f"{digest} {path}\n" for path, digest in self.files.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def distribution_contents(name: str) -> Contents:
    """Reads and hashes the files of an installed distribution. Raises `importlib.metadata.PackageNotFoundError`."""
    distribution = _installed(name)
    recorded = _recorded(distribution)
    roots = _roots_in_place(distribution, recorded)
    found: dict[str, str] = {}
    if roots or not recorded:
        for prefix, root in roots or _roots_by_name(_top_level(distribution)):
            found |= {f"{prefix}{path}": digest for path, digest in _tree(root)}
        found |= _entry_points(distribution)
        return Contents(dict(sorted(found.items())), in_place=True)
    edited: list[str] = []
    missing: list[str] = []
    for path, digest in sorted(recorded.items()):
        file = Path(str(distribution.locate_file(path)))
        if not file.is_file():
            missing.append(path)
            continue
        found[path] = file_digest(file)
        if digest and found[path] != digest:
            edited.append(path)
    found |= _entry_points(distribution)
    return Contents(dict(sorted(found.items())), edited=tuple(edited), missing=tuple(missing))


def installed_contents(name: str) -> Contents:
    """As `distribution_contents`; no files where it is not installed."""
    try:
        return distribution_contents(name)
    except metadata.PackageNotFoundError:
        return Contents({})


def module_contents(module: str) -> Contents:
    """The top-level package of a module that no entry point names: a module on the path, or a part of a distribution.
    Nothing is imported. Empty where there is no such module."""
    top = module.partition(".")[0]
    if top == _OWN_PACKAGE:
        return distribution_contents(OWN_DISTRIBUTION)
    found = {f"{prefix}{path}": digest for prefix, root in _roots_by_name([top]) for path, digest in _tree(root)}
    return Contents(dict(sorted(found.items())), in_place=True)


def local_contents(path: Path) -> Contents:
    """A local file, and the files beside it that it imports, directly or not."""
    files = (file for file in (path, *siblings(path).values()) if file.is_file())
    found = {file.relative_to(path.parent).as_posix(): file_digest(file) for file in files}
    return Contents(dict(sorted(found.items())), in_place=True)


def siblings(path: Path) -> dict[str, Path]:
    """The files in the folder of a local file that it imports, directly or not, by module name ("helper",
    "package.module"), as its source says; of a package all modules. Nothing is imported."""
    folder = path.parent
    found: dict[str, Path] = {}
    to_read = [path]
    while to_read:
        for top in _imported(to_read.pop()):
            if (folder / f"{top}.py").is_file():
                new = {top: folder / f"{top}.py"}
            else:
                new = {_module_name(folder, file): file for file in sorted((folder / top).rglob("*.py"))}
            to_read += [file for name, file in new.items() if name not in found and file != path]
            found |= {name: file for name, file in new.items() if file != path}
    return found


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; read once for as long as it does not change."""
    status = path.stat()
    return _digest(str(path), status.st_size, status.st_mtime_ns)


@cache
def _digest(path: str, size: int, changed_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installed(name: str) -> metadata.Distribution:
    """What an installer recorded comes before what is first on the path: an installation in place leaves metadata in
    its source tree too (`*.egg-info`), found by a process that starts there, and those do not say where all packages
    are."""
    alike = metadata.distributions(name=name)
    return next((one for one in alike if one.read_text("RECORD") is not None), None) or metadata.distribution(name)


def _recorded(distribution: metadata.Distribution) -> dict[str, str]:
    """Files that the installer lists, with their SHA-256 in hexadecimal where it says so; without scripts, whose first
    line is this machine's own, and without what the installer writes about itself."""
    if distribution.read_text("RECORD") is None:
        return {}
    found = {}
    for file in distribution.files or ():
        path = file.as_posix()
        is_about = file.parts[0].endswith((".dist-info", ".egg-info", ".data"))
        if ".." in file.parts or is_about or file.suffix == ".pyc" or file.is_absolute():
            continue
        found[path] = _hexadecimal(file.hash.value) if file.hash is not None and file.hash.mode == "sha256" else ""
    return found


def _hexadecimal(recorded: str) -> str:
    return base64.urlsafe_b64decode(recorded + "=" * (-len(recorded) % 4)).hex()


def _entry_points(distribution: metadata.Distribution) -> dict[str, str]:
    text = distribution.read_text(_ENTRY_POINTS)
    points = sorted(f"{point.group} {point.name} {point.value}\n" for point in distribution.entry_points)
    return {_ENTRY_POINTS: hashlib.sha256("".join(points).encode()).hexdigest()} if text is not None else {}


def _roots_in_place(distribution: metadata.Distribution, recorded: Mapping[str, str]) -> list[tuple[str, Path]]:
    """Folders (with the prefix of their files) and files of a distribution that is installed in place; else none."""
    roots: list[tuple[str, Path]] = []
    for path in recorded:
        name = path.rpartition("/")[2]
        file = Path(str(distribution.locate_file(path)))
        if name.startswith("__editable__") and name.endswith("finder.py") and file.is_file():
            mapping = _mapping(file_digest(file), str(file))
            roots += [(f"{module.replace('.', '/')}", Path(place)) for module, place in mapping.items()]
        elif name.endswith(".pth") and file.is_file() and set(recorded) == {path}:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            for folder in (Path(line) for line in lines if line and not line.startswith(("#", "import"))):
                roots += [(top, folder / top) for top in _top_level(distribution)]
    return [one for prefix, root in roots for one in _as_root(prefix, root)]


@cache
def _mapping(digest: str, finder: str) -> Mapping[str, str]:
    """The table of setuptools' finder of an editable installation: package -> its folder. Parsed once for each
    `digest` of the file."""
    for node in ast.parse(Path(finder).read_bytes()).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        if any(isinstance(target, ast.Name) and target.id == "MAPPING" for target in targets):
            return {str(key): str(place) for key, place in ast.literal_eval(node.value).items()}
    return {}


def _roots_by_name(names: list[str]) -> list[tuple[str, Path]]:
    roots = []
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            roots.append((f"{name}/", Path(place)))
        if spec is not None and spec.submodule_search_locations is None and spec.origin is not None:
            roots.append(("", Path(spec.origin)))
    return roots


def _as_root(prefix: str, root: Path) -> list[tuple[str, Path]]:
    if root.is_dir():
        return [(f"{prefix}/", root)]
    file = root if root.is_file() else root.with_name(f"{root.name}.py")
    return [(f"{prefix.rpartition('/')[0]}/" if "/" in prefix else "", file)] if file.is_file() else []


def _top_level(distribution: metadata.Distribution) -> list[str]:
    """Names of a distribution's top-level modules and packages."""
    listed = (distribution.read_text("top_level.txt") or "").split()
    return listed or sorted({point.value.partition(":")[0].partition(".")[0] for point in distribution.entry_points})


def _tree(root: Path) -> Iterator[tuple[str, str]]:
    """Files below a folder with their hashes, or the one file."""
    if root.is_file():
        yield root.name, file_digest(root)
        return
    yield from _below(str(root), "")


def _below(folder: str, prefix: str) -> Iterator[tuple[str, str]]:
    """As `_tree`, paths after `prefix`. Each start of an engine comes here: a thousand files, so no `Path`."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith(".") or name == "__pycache__" or name.endswith(".pyc"):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, f"{prefix}{name}/")
            elif not entry.is_dir():
                status = entry.stat()
                yield f"{prefix}{name}", _digest(entry.path, status.st_size, status.st_mtime_ns)


def _imported(path: Path) -> set[str]:
    """Top-level names of the modules that a source imports, anywhere in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _module_name(folder: Path, file: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
