"""The record of the public surface, and the gate that keeps it.

python scripts/surface.py --check    fails where a change lacks the version or the line in CHANGELOG.md that it needs
python scripts/surface.py --record   writes the record under docs/surface/, if nothing of that is missing
python scripts/surface.py --anew     writes it whatever changed; only as long as no version of Dovetail was released
--since TAG                          compares with the record of that tag in place of the last one
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import griffe
from link_tree import link_tree
from surface_change import CALLERS, Change
from surface_rules import Surfaces, compare
from surface_table import CONTRACTS, HOST_ONLY, Surface, Version, surfaces
from surface_text import load, module_at, parse, stub

ROOT = Path(__file__).resolve().parents[1]
RECORD = "docs/surface"
VERSIONS = "versions.toml"
AGAIN = "python scripts/surface.py --record"


@dataclass(frozen=True)
class Record:
    """A surface as it was, or is: the stubs by module, and the version of each surface."""

    stubs: Mapping[str, str]
    versions: Mapping[str, Version]

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> Record:
        """The record from the files of its folder, by name."""
        versions = tomllib.loads(files.get(VERSIONS, ""))
        stubs = {name.removesuffix(".pyi"): text for name, text in files.items() if name.endswith(".pyi")}
        return cls(stubs, {name: tuple(map(int, text.split("."))) for name, text in versions.items()})

    def files(self) -> dict[str, str]:
        """What `from_files` reads."""
        versions = "".join(f'"{name}" = "{_dotted(version)}"\n' for name, version in sorted(self.versions.items()))
        return {VERSIONS: versions, **{f"{module}.pyi": text for module, text in self.stubs.items()}}

    def write(self, folder: Path) -> None:
        """Replaces the files of `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        for name, text in self.files().items():
            (folder / name).write_text(text, encoding="utf-8")

    def parsed(self) -> Surfaces:
        """For comparison."""
        return Surfaces({name: parse(name, text) for name, text in self.stubs.items()}, HOST_ONLY)


def take(search_path: Path, table: Iterable[Surface], contracts: str = CONTRACTS) -> Record:
    """The surface of the package below `search_path`, as the table has it."""
    table = tuple(table)
    package = load(search_path, contracts.partition(".")[0])
    chosen: dict[str, str] = {}
    for pattern in (contracts, *(pattern for surface in table for pattern in surface.modules)):
        path, _, names = pattern.partition(":")
        chosen |= dict.fromkeys(_expanded(package, path), names or "*")
    stubs = {module: stub(module_at(package, module), chosen) for module in chosen}
    return Record(stubs, {surface.name: surface.version for surface in table})


def _expanded(package: griffe.Module, pattern: str) -> list[str]:
    """The module, or for "package.*" all public modules below it."""
    if not pattern.endswith(".*"):
        return [pattern]
    below = module_at(package, pattern.removesuffix(".*"))
    return [module.path for name, module in below.modules.items() if not name.startswith("_")]


class Gate:
    """Compares two records and says what is missing."""

    def __init__(self, old: Record, new: Record, table: Iterable[Surface], changelog: str):
        self._versions = old.versions
        self._table = tuple(table)
        self._changelog = changelog
        self._old, self._new = old.parsed(), new.parsed()
        self._reached = {
            surface.name: self._old.reached_from(surface.base) | self._new.reached_from(surface.base)
            for surface in self._table
            if surface.base
        }
        changes = compare(self._old, self._new)
        self.changes = sorted(changes, key=lambda change: (not change.breaks, change.path, change.what))

    def owners(self, change: Change) -> list[str]:
        """The surfaces whose version a change raises. A kind's own contract, whatever the change. What is handed to
        plugins of several kinds, and breaks those that use it: all of these kinds."""
        module = self._module_of(change.path)
        name = ".".join(change.path.split(".")[: module.count(".") + 2])
        exporting = {s.name for s in self._table if any(self._exports(m, name) for m in self._modules_of(s))}
        direct = [s.name for s in self._table if module in self._modules_of(s)]
        if direct:
            return direct
        home = {s.name for s in self._table if s.base.rpartition(".")[0] == module}
        reaching = {kind for kind, names in self._reached.items() if name in names}
        if home and CALLERS not in change.breaks:
            reaching = home & reaching or home
        found = (reaching or home or set(self._reached)) | exporting
        return [surface.name for surface in self._table if surface.name in found]

    def needs(self) -> dict[str, Version]:
        """The lowest version that each changed surface may have."""
        needs: dict[str, Version] = {}
        for change in self.changes:
            for name in self.owners(change):
                needs[name] = max(needs.get(name, ()), self._needed(name, bool(change.breaks)))
        return needs

    def problems(self) -> list[str]:
        """What keeps the change from being recorded: a sentence each."""
        found = []
        for surface in self._table:
            needed = self.needs().get(surface.name)
            if needed is None:
                continue
            recorded = _dotted(self._versions[surface.name]) if surface.name in self._versions else "nothing"
            if surface.version < needed:
                found.append(
                    f"{surface.name}: recorded is {recorded}, the tree says {_dotted(surface.version)}, the changes "
                    f"above need {_dotted(needed)}: write it in {surface.version_in}, or take back what breaks"
                )
            named = max(surface.version, needed)
            if not self._is_told(surface.name, named):
                found.append(
                    f"{surface.name}: no line of CHANGELOG.md names {surface.name} {_dotted(named)}: add one that says "
                    "what changed and what those who use it do about it"
                )
        return found

    def report(self) -> list[str]:
        """The changes, what breaks first."""
        lines = []
        for change in self.changes:
            needs = ", ".join(
                f"{name} {_dotted(self._needed(name, bool(change.breaks)))}" for name in self.owners(change)
            )
            lines.append(f"{change.path}: {change.what}")
            if change.breaks:
                lines.append(f"    breaks {change.breaks}: {change.why}")
            lines.append(f"    needs {needs}" + (f"; or {change.instead}" if change.breaks and change.instead else ""))
        return lines

    def _needed(self, name: str, is_break: bool) -> Version:
        """The version after the recorded one; 0.x versions break in their second number."""
        recorded = self._versions.get(name)
        if recorded is None:
            return ()
        place = (0 if is_break else 1) + (recorded[0] == 0)
        return (*recorded[:place], recorded[place] + 1, *[0] * (len(recorded) - place - 1))

    def _is_told(self, name: str, version: Version) -> bool:
        pattern = rf"(?<![\w.]){re.escape(name)}(?![\w.])\W+{re.escape(_dotted(version))}(?!\.?\d)"
        return re.search(pattern, self._changelog) is not None

    def _module_of(self, path: str) -> str:
        modules = {*self._old.modules, *self._new.modules}
        return max((module for module in modules if path.startswith(f"{module}.")), key=len)

    def _modules_of(self, surface: Surface) -> set[str]:
        patterns = [pattern.partition(":")[0] for pattern in surface.modules]
        modules = {*self._old.modules, *self._new.modules}
        return {module for module in modules if any(fnmatchcase(module, pattern) for pattern in patterns)}

    def _exports(self, module: str, path: str) -> bool:
        return any(s.exports(module, path) for s in (self._old, self._new) if module in s.modules)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def read_record(root: Path, tag: str | None) -> Record:
    """The record in the tree, or of a tag."""
    if tag is None:
        return Record.from_files({path.name: path.read_text(encoding="utf-8") for path in (root / RECORD).glob("*.*")})
    names = _git(root, "ls-tree", "--name-only", f"{tag}:{RECORD}").split()
    return Record.from_files({name: _git(root, "show", f"{tag}:{RECORD}/{name}") for name in names})


def _git(root: Path, *arguments: str) -> str:
    completed = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if completed.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {completed.stderr.strip()}")
    return completed.stdout


def main(arguments: list[str]) -> int:
    """Checks or records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    for name in ("check", "record", "anew"):
        action.add_argument(f"--{name}", action="store_const", const=name, dest="action")
    parser.add_argument("--since", metavar="TAG")
    chosen = parser.parse_args(arguments)
    table = surfaces(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        link_tree(Path(folder) / "dovetail")
        new = take(Path(folder), table)
    if chosen.action == "anew":
        released = _git(ROOT, "tag", "--list", "v*").split()
        if released:
            print(f"{released[-1]} is released: others rely on its surface. Use --record.", file=sys.stderr)
            return 1
        new.write(ROOT / RECORD)
        return 0
    old = read_record(ROOT, chosen.since)
    gate = Gate(old, new, table, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    return finish(gate, new, read_record(ROOT, None), chosen.action, ROOT / RECORD)


def finish(gate: Gate, new: Record, recorded: Record, action: str, folder: Path) -> int:
    """Prints what changed and what is missing, or writes the record."""
    problems = gate.problems()
    if not problems and action == "record":
        new.write(folder)
        return 0
    if not problems and new != recorded:
        problems = [f"the surface changed as its versions allow, and is not recorded yet: {AGAIN}"]
    for line in (*(gate.report() if problems else ()), *problems):
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
