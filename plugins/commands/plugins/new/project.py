"""Renders a distribution and writes it: all of it, or nothing."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from dovetail.commands.installed import HOOKS_KIND
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kinds import HOOKS_GROUP, KINDS
from dovetail.plugins.commands.plugins.new.names import Author, ProjectNames
from dovetail.plugins.commands.plugins.new.templates import Template

_PLACES = {
    "plugin.py": "src/{package}/plugin.py",
    "init.py": "src/{package}/__init__.py",
    "test_plugin.py": "tests/test_plugin.py",
    "ci.yml": ".github/workflows/test.yml",
    "gitignore": ".gitignore",
}
"""Where files go whose place is not the distribution's root."""


def render(template: Template, names: ProjectNames, kind: str, author: Author, version: str) -> dict[str, str]:
    """Returns the distribution's files, path -> content. `version` is Dovetail's. Raises `PluginError` for a template
    with a mistake."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)  # a string of TOML as well
    values: dict[str, Any] = {
        "distribution": names.distribution,
        "package": names.package,
        "plugin": names.package,
        "class_name": _class_name(template, names),
        "kind": kind,
        "kind_words": kind.replace("_", " "),
        "group": HOOKS_GROUP if kind == HOOKS_KIND else KINDS[kind].group,
        "summary": template.summary,
        "dependencies": template.dependencies,
        "author": author,
        "year": datetime.datetime.now(tz=datetime.UTC).year,
        "dovetail_version": version,
    }
    values["reference"] = f"{names.package}.plugin" + ("" if kind == HOOKS_KIND else f":{values['class_name']}")
    values["usage"] = _rendered(environment, "usage.md", template, values)
    files = {}
    for name in template.files:
        if name != "usage.md":
            place = _PLACES.get(name, name).format(package=names.package)
            files[place] = _rendered(environment, name, template, values)
    return files


def _rendered(environment: jinja2.Environment, name: str, template: Template, values: Mapping[str, Any]) -> str:
    try:
        return environment.from_string(template.files[name]).render(values)
    except jinja2.TemplateError as error:
        raise PluginError(f"the template's {name} has a mistake: {error}") from error


def _class_name(template: Template, names: ProjectNames) -> str:
    """The name's own, or with "Plugin" behind it where the template's code has that word already."""
    code = template.files["plugin.py"] + template.files["test_plugin.py"]
    is_taken = re.search(rf"\b{names.class_name}\b", code) is not None
    return names.class_name + ("Plugin" if is_taken else "")


def check_folder(folder: Path) -> None:
    """Raises `ConfigError` unless the folder can be made: it must not exist, and the one that it is in must."""
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists, and is left as it is: give another --folder")
    if not folder.parent.is_dir():
        raise ConfigError(f"there is no folder {folder.parent}: make it, or give another --folder")


def write(files: Mapping[str, str], folder: Path) -> None:
    """Makes `folder` with `files` in it. Raises `ConfigError` where that fails, and leaves nothing behind then."""
    check_folder(folder)
    unfinished = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    try:
        for name, text in files.items():
            path = unfinished / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        unfinished.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
