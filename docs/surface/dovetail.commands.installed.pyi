from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dovetail.config.resolved import Component
from dovetail.contracts.plugin import Plugin
from dovetail.registry.entries import Scan
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "CODES",
    "Code",
    "Diagnosis",
    "Entry",
    "Finding",
    "HOOKS_KIND",
    "Registry",
    "Severity",
    "base_class",
    "class_facts",
    "config_schema",
    "diagnose",
    "import_environment",
    "import_object",
    "kind_version",
    "module_command",
    "reference_entry",
    "written_text",
]
CODES: dict[str, Code] = ...

@dataclass(frozen=True)
class Code:
    severity: Severity
    meaning: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...]
    def of(self, entry: Entry) -> list[Finding]: ...
    @property
    def errors(self) -> list[Finding]: ...


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
    code: str
    severity: Severity
    subject: str
    message: str
    remedy: str
    others: tuple[str, ...] = ()

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

Severity = Literal['error', 'warning', 'note']
def base_class(kind: str) -> type[Plugin]: ...
def class_facts(base: type[Plugin]) -> list[str]: ...
def config_schema(registry: Registry) -> tuple[dict[str, Any], list[str]]: ...
def diagnose(
    registry: Registry,
    names: Sequence[str] = (),
    *,
    loads: bool = False,
    timeout_s: float = 60.0,
) -> Diagnosis: ...
def import_environment() -> dict[str, str]: ...
def import_object(entry: Entry) -> object: ...
def kind_version(kind: str) -> str: ...
def module_command(module: str, *arguments: str) -> list[str]: ...
def reference_entry(reference: str) -> Entry: ...
def written_text(reference: str, name: str) -> str | None: ...
