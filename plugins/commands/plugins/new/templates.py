"""Templates of distributions: one for each kind in this package, and those of installed plugins.

A template is a folder:

    template.toml       `summary`, a line that says what the plugin does; `dependencies`, a list, may be left out
    plugin.py.jinja     the plugin, whose class is called {{ class_name }}
    test_plugin.py.jinja
    usage.md.jinja      how to use the plugin, for the README
    NAME.jinja          any other file, written to the distribution's root as NAME

A plugin offers one by an entry point in the group `dovetail.templates`, which is named KIND.NAME and points to the
package that the folder is: ``scheduler.fcfs = "dovetail.schedulers.templates.fcfs"``. Third parties may do so too.
Files that its folder lacks are those of the kind's own template.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.resources.abc import Traversable

from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kinds import TEMPLATES_GROUP

_PACKAGE = "dovetail.plugins.commands.plugins.new"
_SUFFIX = ".jinja"


@dataclass(frozen=True)
class Template:
    """A distribution's files before names are put in."""

    summary: str
    """What the plugin does, in a line."""
    dependencies: tuple[str, ...]
    """Requirements besides dovetail."""
    files: Mapping[str, str]
    """File name -> Jinja source, those that all kinds have in common among them."""


def offered(kind: str) -> list[str]:
    """Names of plugins that a new one of `kind` may start from."""
    return sorted({name for of, name in _points() if of == kind})


def kinds_offering(name: str) -> list[str]:
    """Kinds with a template of that name."""
    return sorted({kind for kind, of in _points() if of == name})


def load_template(kind: str, start: str | None) -> Template:
    """The kind's own template, or that of the plugin `start`.

    Raises `ConfigError` for a name that nothing offers, and `PluginError` for a template that cannot be read.
    """
    own = importlib.resources.files(_PACKAGE) / "templates"
    if start is None:
        return _read(own / kind, _sources(own / "common"))
    point = _find(kind, start)
    try:
        return _read(importlib.resources.files(point.value), {**_sources(own / "common"), **_sources(own / kind)})
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise PluginError(f"the template {point.name} = {point.value} cannot be read: {error}") from error


def _points() -> dict[tuple[str, str], list[EntryPoint]]:
    """(kind, name) -> entry points, of which more than one is a conflict."""
    found: dict[tuple[str, str], list[EntryPoint]] = {}
    for point in entry_points(group=TEMPLATES_GROUP):
        kind, _, name = point.name.partition(".")
        found.setdefault((kind, name), []).append(point)
    return found


def _find(kind: str, start: str) -> EntryPoint:
    points = _points().get((kind, start), [])
    if len({point.value for point in points}) == 1:
        return points[0]
    if points:
        owners = sorted(point.dist.name for point in points if point.dist is not None)
        raise ConfigError(f"--from {start}: {' and '.join(owners)} each have such a template: uninstall one of them")
    names = offered(kind)
    can = f"a {kind} can start from {', '.join(names)}" if names else f"a {kind} has no such start: leave --from out"
    other = kinds_offering(start)
    belongs = f" '{start}' is a {' and a '.join(other)}, not a {kind};" if other else ""
    raise ConfigError(f"--from {start}:{belongs} {can}")


def _read(folder: Traversable, inherited: Mapping[str, str]) -> Template:
    facts = tomllib.loads((folder / "template.toml").read_text(encoding="utf-8"))
    return Template(str(facts["summary"]), tuple(facts.get("dependencies", ())), {**inherited, **_sources(folder)})


def _sources(folder: Traversable) -> dict[str, str]:
    return {
        file.name.removesuffix(_SUFFIX): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(_SUFFIX)
    }
