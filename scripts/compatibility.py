"""The compatibility matrix: what each bundled plugin declares, kind by kind, and what its conformance suite found.

python scripts/compatibility.py --write FILE   writes the page
python scripts/compatibility.py --check FILE   fails where the page is not what it would write

Nothing in the page is written by hand: the classes are loaded through their entry points, and their `capabilities`,
facts and bases are read. What the suites found is in docs/conformance.json, which scripts/conformance_record.py writes.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.contracts.kinds import KINDS, Kind
from dovetail.contracts.plugin import Plugin
from dovetail.registry.loading import base_class, class_facts

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "conformance.json"
"""What the suites found: by kind and name, the number of cases by outcome, and the versions."""
LONG = 8
"""A set with more members than this has a table of its own."""
NOT_SHOWN = ("Options", "capabilities", "contract", "preference", "stability")
HEAD = """\
# Compatibility

<!-- made by python scripts/compatibility.py --write docs/compatibility.md -->

What the bundled plugins declare, read from their classes. What a plugin does not declare is refused, by a sentence that
names it and says what to do. So these tables say what may be combined; `dovetail explain` says it for one config,
with plugins of other people. A name in code (`MovesSlots`) is a class of the contract from which a plugin
derives if it has that ability.

"Conformance" is what the kind's suite found in Dovetail's own tests ([the suites](writing/testing.md) that everyone
runs), on a machine without a GPU, as `make conformance` recorded it. A case is skipped where the plugin does not
declare what it is about, or where the machine lacks what it needs.
"""


def bundled(kind: Kind) -> dict[str, type[Plugin]]:
    """The plugins of that kind that come with Dovetail, by name."""
    entries = [entry for entry in entry_points(group=kind.group) if entry.dist and entry.dist.name == "dovetail"]
    return {entry.name: entry.load() for entry in sorted(entries, key=lambda entry: entry.name)}


def abilities(plugin: type, base: type) -> list[str]:
    """Names of the classes of the contracts that it derives from, other than its kind's base."""
    mine = [each for each in plugin.__mro__ if each.__module__.startswith("dovetail.contracts.")]
    return [each.__name__ for each in mine if not issubclass(base, each)]


def declared(plugin: type[Plugin], base: type) -> dict[str, Any]:
    """What a plugin declares: the fields of its capabilities, and the other facts of its kind."""
    record = plugin.capabilities
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)} if record else {}
    return fields | {name: getattr(plugin, name) for name in class_facts(base) if name not in NOT_SHOWN}


def meanings_of_none(module: str) -> dict[str, str]:
    """By attribute, what its docstring in that module of the contracts says after "None:"."""
    found = {}
    for node in ast.walk(ast.parse((ROOT / "core" / "contracts" / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for field, text in pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    said = re.search(r"None: ([^.;]+)", ast.unparse(text))
                    if said is not None:
                        found[ast.unparse(field.target)] = said[1]
    return found


def cell(value: Any, none: str = "–") -> str:
    """A declared value, as a table says it; `none` is what None means."""
    if value is None:
        return none
    if isinstance(value, bool):
        return "yes" if value else "–"
    if isinstance(value, str):
        return code(value)
    if isinstance(value, Iterable):
        return ", ".join(code(each) for each in ordered(value)) or "–"
    return str(value)


def ordered(values: Iterable[Any]) -> list[Any]:
    """In an order that every run repeats; what has one of its own keeps it."""
    return sorted(values, key=str) if isinstance(values, (set, frozenset)) else list(values)


def code(text: object) -> str:
    """As code, in a cell of a table."""
    return f"`{str(text).strip().replace('|', chr(92) + '|')}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def is_long(values: Sequence[Any]) -> bool:
    """Whether some of the values are sets of many members."""
    return any(isinstance(value, (set, frozenset, tuple, list)) and len(value) > LONG for value in values)


def members(name: str, by_plugin: Mapping[str, Any]) -> list[str]:
    """The part about one long set: who has which member; or what each has, where no two share one."""
    lists = {plugin: ordered(value or ()) for plugin, value in by_plugin.items()}
    every = sorted({member for value in lists.values() for member in value}, key=str)
    lines = ["", f"`{name}`:", ""]
    if len(every) == sum(map(len, lists.values())):
        return lines + table(["", name], [[plugin, cell(value)] for plugin, value in lists.items()])
    rows = [[code(member), *(cell(member in value) for value in lists.values())] for member in every]
    return lines + table(["", *lists], rows)


def section(name: str, kind: Kind, record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The part about one kind."""
    plugins, base = bundled(kind), base_class(name)
    facts = {each: declared(plugin, base) for each, plugin in plugins.items()}
    classes = {each: abilities(plugin, base) for each, plugin in plugins.items()}
    module = kind.base.partition(":")[0].rpartition(".")[2]
    nones = meanings_of_none(module)
    rows = [
        ["contract", *(".".join(map(str, plugin.contract)) for plugin in plugins.values())],
        ["stability", *(plugin.stability for plugin in plugins.values())],
        ["conformance", *(found_by_suite(record.get(f"{name}:{plugin}")) for plugin in plugins)],
    ]
    num_common = len(rows)
    long: list[str] = []
    for fact in dict.fromkeys(fact for each in facts.values() for fact in each):
        values = {each: declared_facts.get(fact) for each, declared_facts in facts.items()}
        if is_long(list(values.values())):
            long += members(fact, values)
        else:
            rows.append([fact, *(cell(value, nones.get(fact, "–")) for value in values.values())])
    for ability in sorted({ability for each in classes.values() for ability in each}):
        rows.append([code(ability), *(cell(ability in each) for each in classes.values())])
    lines = [
        "",
        f"## {name.replace('_', ' ').capitalize()}",
        "",
        f"{kind.summary[0].upper()}{kind.summary[1:]}; [{module}.py](../core/contracts/{module}.py) {kind.version}.",
        "",
    ]
    if rows[num_common:]:
        return [*lines, *table(["", *plugins], rows), *long]
    head, *by_plugin = zip(["", *plugins], *rows, strict=True)
    return [*lines, *table(head, by_plugin), *long]


def found_by_suite(found: Mapping[str, Any] | None) -> str:
    """A cell about the suite of a plugin."""
    if found is None:
        return "not recorded"
    outcomes = [f"{found[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed") if found[outcome]]
    return ", ".join(outcomes)


def page() -> str:
    """The whole page."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    lines = [line for name, kind in KINDS.items() for line in section(name, kind, record)]
    return "\n".join([HEAD.rstrip(), *lines, ""])


def main() -> int:
    """Returns 0; 1 where the page is not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.write:
        given.write.write_text(page(), encoding="utf-8")
    elif given.check.read_text(encoding="utf-8") != page():
        print(f"{given.check} is not what the plugins declare: run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
