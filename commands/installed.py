"""Finds, loads and examines installed plugins, and gives the config's schema with their options.

`module_command` and `import_environment` start a Python process that imports what this one does.
"""

from __future__ import annotations

from dovetail.commands.diagnosis import CODES, Code, Diagnosis, Finding, Severity, diagnose, reference_entry
from dovetail.commands.json_schema import config_schema
from dovetail.commands.summary import written_text
from dovetail.registry.entries import HOOKS_KIND, Entry, kind_version
from dovetail.registry.imports import import_environment, module_command
from dovetail.registry.loading import base_class, class_facts, import_object
from dovetail.registry.registry import Registry

__all__ = [
    "CODES",
    "HOOKS_KIND",
    "Code",
    "Diagnosis",
    "Entry",
    "Finding",
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
