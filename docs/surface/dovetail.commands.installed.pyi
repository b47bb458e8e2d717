from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dovetail.commands.diagnosis import Diagnosis
from dovetail.config.resolved import Component
from dovetail.contracts.plugin import Plugin
from dovetail.registry.entries import Scan
from pathlib import Path
from typing import Any

__all__ = [
    "Entry",
    "Finding",
    "HOOKS_KIND",
    "Registry",
    "base_class",
    "class_facts",
    "config_schema",
    "diagnose",
    "kind_version",
    "reference_entry",
    "written_text",
]

@dataclass(frozen=True)
class Entry:
    kind: str
    name: str
    reference: str
    major: int
    distribution: str | None = None
    version: str | None = None
    refusal: str | None = None
    @property
    def qualified_name(self) -> str: ...
    @property
    def is_own(self) -> bool: ...
    @property
    def origin(self) -> str: ...
    @property
    def label(self) -> str: ...


@dataclass(frozen=True)
class Finding:
    entry: Entry
    problem: str | None

HOOKS_KIND = 'hooks'

class Registry:
    def __init__(self, scan: Scan): ...
    metadata: Scan
    @classmethod
    def scan(cls) -> Registry: ...
    def entries(self, kind: str) -> list[Entry]: ...
    def refused(self, kind: str) -> list[Entry]: ...
    def hook_entries(self) -> list[Entry]: ...
    def name_of(self, entry: Entry) -> str: ...
    def find(self, kind: str, name: str, base_dir: Path | None = None) -> Entry: ...
    def load(self, kind: str, name: str, base_dir: Path | None = None) -> type[Plugin]: ...
    def load_entry(self, entry: Entry) -> type[Plugin]: ...
    def component(
        self,
        kind: str,
        name: str,
        options: Mapping[str, Any] | None = None,
        base_dir: Path | None = None,
    ) -> Component: ...

def base_class(kind: str) -> type[Plugin]: ...
def class_facts(base: type[Plugin]) -> list[str]: ...
def config_schema(registry: Registry) -> tuple[dict[str, Any], list[str]]: ...
def diagnose(registry: Registry, references: Sequence[str] = ()) -> Diagnosis: ...
def kind_version(kind: str) -> str: ...
def reference_entry(reference: str) -> Entry: ...
def written_text(reference: str, name: str) -> str | None: ...
