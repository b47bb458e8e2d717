"""The gate that keeps the public surface: which change needs which version, and that the record equals the tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

BASE = """
from __future__ import annotations
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol
from acme.contracts.shared import Batch
"""
SHARED = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Batch:
    size: int
    names: tuple[str, ...] = ()
"""
RED, GREEN = (2, 0), (1, 1)


@pytest.fixture(scope="module")
def gate(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("surface")


@pytest.fixture
def acme(gate: ModuleType, tmp_path: Path) -> Any:
    return Acme(gate, tmp_path)


class Acme:
    """A package with the contracts of two kinds: mixer, whose module is given, and baker; both are handed `Batch`."""

    def __init__(self, gate: ModuleType, folder: Path):
        self._gate = gate
        self._folder = folder
        self._num_taken = 0

    def take(self, mixer: str = "", shared: str = SHARED, version: tuple[int, int] = (1, 0), **modules: str) -> Any:
        """The surface of the package with these sources."""
        self._num_taken += 1
        folder = self._folder / str(self._num_taken)
        sources = {"mixer": BASE + dedent(mixer), "shared": shared, "baker": BASE + BAKER} | modules
        for name, text in {"__init__": "", **sources}.items():
            path = folder / "acme" / "contracts" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (folder / "acme" / "__init__.py").write_text("")
        return self._gate.take(folder, self.table(version), "acme.contracts.*")

    def table(self, mixer: tuple[int, int] = (1, 0)) -> list[Any]:
        surface = sys.modules["surface_table"].Surface
        return [
            surface("mixer", mixer, "kinds.py", base="acme.contracts.mixer.Mixer"),
            surface("baker", (1, 0), "kinds.py", base="acme.contracts.baker.Baker"),
        ]

    def gate(self, old: Any, new: Any, changelog: str = "", version: tuple[int, int] = (1, 0)) -> Any:
        return self._gate.Gate(old, new, self.table(version), changelog)


BAKER = """
class Baker(ABC):
    @abstractmethod
    def bake(self, batch: Batch) -> int: ...
"""

MIXER = """
class Mixer(ABC):
    speed: ClassVar[int] = 3
    limit: ClassVar[int]

    def __init__(self, size: int):
        self.size = size

    @abstractmethod
    def mix(self, batch: Batch, hard: bool = False) -> int | None:
        "What mixing is."
        return len(batch.names)

    def rest(self) -> None:
        return None

class Host(Protocol):
    def ask(self, name: str) -> int: ...

@dataclass(frozen=True)
class Dough:
    flour: float
    water: float | None
    salt: float = 0.1

@dataclass(kw_only=True)
class Note:
    author: str
    text: str = ""
    reserved: None = None

class State(Enum):
    WET = "wet"
    DRY = "dry"

class Pair(NamedTuple):
    left: int
    right: int = 0

class Block:
    def forward(self, x: int, y: int = 1, *, z: int = 2) -> float | int: ...

LIMIT: Final = 10
Mode = Literal["slow", "fast"]

def knead(dough: Dough, times: int = 2, *, cold: bool = False) -> list[int]: ...
"""

CALLERS, IMPLEMENTERS = "callers", "implementers"
BOTH = "callers and implementers"
# name: (what stands in MIXER, what stands in its place, the change that is found, whom it breaks)
BREAKS = {
    "a removed function": ("def knead(", "def _knead(", "removed or renamed", BOTH),
    "a renamed class": ("class Note", "class Memo", "removed or renamed", BOTH),
    "a renamed method": ("def rest(", "def pause(", "removed or renamed", BOTH),
    "a removed field": ("    salt: float = 0.1\n", "", "removed or renamed", BOTH),
    "a required argument": ("times: int = 2, *", "times: int = 2, *, salt: float", "required parameter", CALLERS),
    "a required argument of what plugins override": (
        "hard: bool = False)",
        "hard: bool = False, *, hot: bool)",
        "required parameter 'hot' is new",
        BOTH,
    ),
    "a required field": ("    text: str", "    date: str\n    text: str", "a required field is new", CALLERS),
    "a required field with metadata": (
        "    text: str",
        "    date: str = field(metadata={1: 2})\n    text: str",
        "a required field is new",
        CALLERS,
    ),
    "a required field without a default of its own": (
        "    text: str",
        "    date: str = field(repr=False)\n    text: str",
        "a required field is new",
        CALLERS,
    ),
    "a required class variable": (
        "    limit: ClassVar[int]",
        "    limit: ClassVar[int]\n    depth: ClassVar[int]",
        "implementations must have",
        IMPLEMENTERS,
    ),
    "a default that is gone": ("times: int = 2", "times: int", "default was 2, is None", CALLERS),
    "a changed default": ("times: int = 2", "times: int = 3", "default was 2, is 3", CALLERS),
    "a changed default of a field": ("salt: float = 0.1", "salt: float = 0.2", "value was 0.1, is 0.2", BOTH),
    "a field whose default is gone": ('text: str = ""', "text: str", "the default '' is gone", BOTH),
    "a changed ClassVar": ("speed: ClassVar[int] = 3", "speed: ClassVar[int] = 4", "value was 3, is 4", BOTH),
    "a changed constant": ("LIMIT: Final = 10", "LIMIT: Final = 11", "value was 10, is 11", BOTH),
    "a changed alias": ('Literal["slow", "fast"]', 'Literal["slow"]', "value was", BOTH),
    "a new abstract method": (
        "    def rest(",
        "    @abstractmethod\n    def stop(self) -> None: ...\n    def rest(",
        "implementations must have",
        IMPLEMENTERS,
    ),
    "a method that became abstract": (
        "    def rest(",
        "    @abstractmethod\n    def rest(",
        "became abstract",
        IMPLEMENTERS,
    ),
    "a new method of a protocol": (
        "    def ask(",
        "    def tell(self) -> None: ...\n    def ask(",
        "implementations must have",
        IMPLEMENTERS,
    ),
    "an optional argument of what plugins override": (
        "def rest(self)",
        "def rest(self, seconds: int = 1)",
        "parameter 'seconds' is new",
        IMPLEMENTERS,
    ),
    "a constructor that the host calls": (
        "self, size: int)",
        "self, size: int, name: str = '')",
        "parameter 'name' is new",
        IMPLEMENTERS,
    ),
    "a renamed argument of a building block": ("x: int, y: int", "x: int, why: int", "'y' was removed", CALLERS),
    "an argument that became keyword-only": (
        "x: int, y: int = 1, *,",
        "x: int, *, y: int = 1,",
        "keyword-only",
        CALLERS,
    ),
    "arguments in another order": ("x: int, y: int = 1", "y: int = 1, x: int = 0", "changed their order", CALLERS),
    "an argument in between": (
        "dough: Dough, times: int = 2",
        "dough: Dough, cold2: bool = False, times: int = 2",
        "changed their order",
        CALLERS,
    ),
    "fields in another order": (
        "    flour: float\n    water: float | None",
        "    water: float | None\n    flour: float",
        "fields changed their order",
        CALLERS,
    ),
    "an optional field in between": (
        "    salt: float = 0.1",
        "    yeast: float = 0\n    salt: float = 0.1",
        "fields changed their order",
        CALLERS,
    ),
    "an item of a tuple": ("    right: int = 0", "    right: int = 0\n    top: int = 0", "one more item", CALLERS),
    "a narrower argument": ("cold: bool", "cold: Literal[False]", "annotation was bool", CALLERS),
    "a wider result": ("-> float | int", "-> float | int | None", "returns: the annotation", CALLERS),
    "a wider argument of what plugins override": (
        "batch: Batch, hard",
        "batch: Batch | None, hard",
        "annotation was Batch",
        IMPLEMENTERS,
    ),
    "a narrower result of what plugins override": ("-> int | None", "-> int", "returns: the annotation", IMPLEMENTERS),
    "another annotation of a field": ("flour: float", "flour: int", "annotation was float, is int", BOTH),
    "a wider annotation of a field": ("flour: float", "flour: float | None", "annotation was float", BOTH),
    "a changed enum value": ('DRY = "dry"', 'DRY = "arid"', "value was 'dry', is 'arid'", BOTH),
    "a lost base": ("class Mixer(ABC)", "class Mixer", "no longer derives from ABC", BOTH),
    "a dataclass that thaws": ("@dataclass(frozen=True)", "@dataclass", "decorators were", BOTH),
    "a function that became a class": (
        "def knead(dough: Dough, times: int = 2, *, cold: bool = False) -> list[int]: ...",
        "class knead: ...",
        "was a function, is a class",
        BOTH,
    ),
    "a field that became a property": (
        "    salt: float = 0.1",
        "    @property\n    def salt(self) -> float: ...",
        "is a property",
        BOTH,
    ),
    "a method that became async": ("    def forward", "    async def forward", "async changed", BOTH),
    "a method that became a property": ("    def rest", "    @property\n    def rest", "was a function", BOTH),
    "a class method": ("    def rest(self)", "    @classmethod\n    def rest(cls)", "decorators were", BOTH),
}

ADDITIONS = {
    "a name": ("LIMIT: Final", "MORE = 3\nLIMIT: Final", "added"),
    "an optional argument": ("*, cold", "*, salt: float = 0.1, cold", "optional parameter 'salt' was added"),
    "an optional argument of a building block": (
        "y: int = 1, *",
        "y: int = 1, w: int = 0, *",
        "optional parameter 'w'",
    ),
    "an optional field": ("    salt: float = 0.1", "    salt: float = 0.1\n    yeast: float = 0", "added"),
    "a field of a record of keywords": ("    author: str", "    date: str | None = None\n    author: str", "added"),
    "a method with a body": (
        "    def rest(",
        "    def stop(self) -> None:\n        return None\n    def rest(",
        "added",
    ),
    "a ClassVar with a value": ("    speed:", "    depth: ClassVar[int] = 1\n    speed:", "added"),
    "a use for a reserved field": ("reserved: None", "reserved: Dough | None", "was reserved, and may be"),
    "an enum member": ('    DRY = "dry"', '    DRY = "dry"\n    ICE = "ice"', "added"),
    "a default": ("dough: Dough, times", "dough: Dough = Dough(1, 2), times", "has a default"),
    "a wider argument": ("cold: bool", "cold: bool | None", "annotation was bool"),
    "a narrower result": ("-> float | int", "-> float", "returns: the annotation"),
    "what need not be implemented any more": (
        "    @abstractmethod\n    def mix",
        "    def mix",
        "need not be implemented",
    ),
}

NOTHING = {
    "a docstring": ('"What mixing is."', '"Something else."'),
    "metadata of a field": ('text: str = ""', "text: str = field(default='', metadata={1: 2})"),
    "a body": ("return len(batch.names)", "return 0"),
    "a private name": ("LIMIT: Final", "_hidden = 3\nLIMIT: Final"),
    "another spelling of an annotation": ("ClassVar[int] = 3", "typing.ClassVar[int] = 3"),
}


def replaced(what: str, by: str) -> str:
    assert what in MIXER
    return ("import typing\n" if "typing." in by else "") + MIXER.replace(what, by)


@pytest.mark.parametrize(("what", "by", "found", "whom"), BREAKS.values(), ids=BREAKS.keys())
def test_what_breaks_others_needs_a_major_version(acme, what, by, found, whom):
    gate = acme.gate(acme.take(MIXER), acme.take(replaced(what, by)))
    broken = [change for change in gate.changes if change.breaks]
    assert [change for change in broken if found in change.what and change.breaks == whom], gate.report()
    assert gate.needs() == {"mixer": RED}
    assert all(change.why for change in broken)


@pytest.mark.parametrize(("what", "by", "found"), ADDITIONS.values(), ids=ADDITIONS.keys())
def test_what_is_added_needs_a_minor_version(acme, what, by, found):
    gate = acme.gate(acme.take(MIXER), acme.take(replaced(what, by)))
    [change] = gate.changes
    assert (found in change.what, change.breaks) == (True, "")
    assert gate.needs() == {"mixer": GREEN}


@pytest.mark.parametrize(("what", "by"), NOTHING.values(), ids=NOTHING.keys())
def test_what_nobody_sees_needs_nothing(acme, what, by):
    gate = acme.gate(acme.take(MIXER), acme.take(replaced(what, by)))
    assert gate.changes == []
    assert gate.problems() == []


def test_a_protocol_that_the_host_alone_implements_may_grow(gate, acme, monkeypatch):
    monkeypatch.setattr(gate, "HOST_ONLY", frozenset({"acme.contracts.mixer.Host"}))
    grown = MIXER.replace("    def ask(", "    def tell(self) -> None: ...\n    def ask(")
    assert acme.gate(acme.take(MIXER), acme.take(grown)).needs() == {"mixer": GREEN}


def test_hooks_are_called_by_name_and_may_get_arguments(acme):
    hook = "import pluggy\nhookspec = pluggy.HookspecMarker('acme')\n@hookspec\ndef started({}) -> None: ...\n"
    old = acme.take(MIXER, hooks=hook.format("config: int"))
    assert not [
        c for c in acme.gate(old, acme.take(MIXER, hooks=hook.format("now: int, config: int"))).changes if c.breaks
    ]
    assert [c.breaks for c in acme.gate(old, acme.take(MIXER, hooks=hook.format(""))).changes] == [
        "callers and implementers"
    ]


def test_a_record_of_several_kinds_raises_all_of_them(acme):
    old = acme.take(MIXER)
    assert acme.gate(old, acme.take(MIXER, SHARED + "    more: int = 0\n")).needs() == {"mixer": GREEN, "baker": GREEN}
    assert acme.gate(old, acme.take(MIXER, SHARED.replace("size", "length"))).needs() == {"mixer": RED, "baker": RED}


def test_what_breaks_implementers_alone_raises_their_kind_alone(acme):
    handed = (
        BASE + "from acme.contracts.mixer import Mixer\n" + BAKER + "    def use(self, mixer: Mixer) -> None: ...\n"
    )
    old, stricter = acme.take(MIXER, baker=handed), MIXER.replace("    def rest(", "    @abstractmethod\n    def rest(")
    assert acme.gate(old, acme.take(stricter, baker=handed)).needs() == {"mixer": RED}
    renamed = MIXER.replace("def rest(", "def pause(")
    assert acme.gate(old, acme.take(renamed, baker=handed)).needs() == {"mixer": RED, "baker": RED}


def test_members_of_a_base_that_is_not_public_are_recorded_with_the_class(gate, tmp_path):
    package = tmp_path / "acme"
    (package / "inner").mkdir(parents=True)
    for path, text in {
        "__init__.py": "from acme.inner.things import Thing\n__all__ = ['Thing']\n",
        "inner/__init__.py": "",
        "inner/things.py": "SIZE = 4\nclass _Base:\n    def use(self, size: int = SIZE) -> int: ...\n"
        "class Thing(_Base):\n    def _hide(self) -> None: ...\n",
    }.items():
        (package / path).write_text(text)
    surface = sys.modules["surface_table"].Surface
    record = gate.take(tmp_path, [surface("acme", (0, 1, 0), "", ("acme",))], "acme")
    assert record.stubs["acme"].splitlines()[-2:] == ["class Thing:", "    def use(self, size: int = 4) -> int: ..."]


def test_a_version_and_a_line_in_the_changelog_let_a_change_pass(acme):
    old = acme.take(MIXER)
    new = acme.take(MIXER + "\nMORE = 3\n", version=(1, 1))
    [too_low, untold] = acme.gate(old, new).problems()
    assert "mixer: recorded is 1.0, the tree says 1.0, the changes above need 1.1: write it in kinds.py" in too_low
    assert "no line of CHANGELOG.md names mixer 1.1" in untold
    assert acme.gate(old, new, "- `mixer` 1.1: MORE", (1, 1)).problems() == []
    assert acme.gate(old, new, "- `mixer` 1.10: MORE", (1, 1)).problems() != []
    assert acme.gate(old, new, "- `premixer` 1.1: MORE", (1, 1)).problems() != []


def test_the_report_says_what_breaks_whom_and_what_to_do(acme):
    gate = acme.gate(acme.take(MIXER), acme.take(MIXER.replace("def rest(self)", "def rest(self, seconds: int = 1)")))
    assert gate.report() == [
        "acme.contracts.mixer.Mixer.rest: parameter 'seconds' is new",
        "    breaks implementers: the host may pass it, and existing overrides do not take it",
        "    needs mixer 2.0; or put it into a record that is passed already, as a field with a default",
    ]


def test_before_version_1_the_second_number_says_what_breaks(gate, acme):
    old = acme.take(MIXER)
    old = gate.Record(old.stubs, {"mixer": (0, 3, 1), "baker": (1, 0)})
    assert acme.gate(old, acme.take(MIXER + "\nMORE = 3\n")).needs() == {"mixer": (0, 3, 2)}
    assert acme.gate(old, acme.take(MIXER.replace("def rest", "def pause"))).needs() == {"mixer": (0, 4, 0)}


def test_recording_is_refused_until_nothing_is_missing(gate, acme, tmp_path, capsys):
    folder = tmp_path / "record"
    old, new = acme.take(MIXER), acme.take(MIXER + "\nMORE = 3\n", version=(1, 1))
    old.write(folder)
    assert gate.finish(acme.gate(old, new), new, old, "record", folder) == 1
    assert "added" in capsys.readouterr().err
    passing = acme.gate(old, new, "mixer 1.1", (1, 1))
    assert gate.finish(passing, new, old, "check", folder) == 1
    assert "is not recorded yet: python scripts/surface.py --record" in capsys.readouterr().err
    assert gate.finish(passing, new, old, "record", folder) == 0
    read = gate.Record.from_files({path.name: path.read_text() for path in folder.iterdir()})
    assert read == new
    assert gate.finish(acme.gate(read, new), new, read, "check", folder) == 0


def test_the_record_equals_the_tree(gate, capsys):
    assert gate.main(["--check"]) == 0, capsys.readouterr().err


def test_what_bundled_plugins_import_is_public(gate):
    public = gate.read_record(ROOT, None).stubs.keys()
    folders = ("plugins", "attention_backends", "executors", "schedulers", "spec_decode")
    own = {f"dovetail.{folder}" for folder in folders}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("dovetail."):
                is_own = any(f"{node.module}.".startswith(f"{package}.") for package in own)
                assert is_own or node.module in public, (
                    f"{path} imports {node.module}: see commands/diagnosis/public_modules.toml"
                )


def test_what_the_table_names_is_there(gate):
    surfaces = gate.surfaces(ROOT)
    record = gate.read_record(ROOT, None).parsed()
    assert all(record.find(path) is not None for path in gate.HOST_ONLY)
    assert all(record.find(surface.base) is not None for surface in surfaces if surface.base)
