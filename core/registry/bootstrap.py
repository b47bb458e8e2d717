"""The one function through which every process role (driver, engine, worker, server) gets its plugins."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config.resolved import Component
from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.registry.calls import calling
from dovetail.registry.components import component_entry, create_class, validate_options
from dovetail.registry.contents import Contents, installed_contents, local_contents, module_contents
from dovetail.registry.distributions import installed_version
from dovetail.registry.loading import is_file_reference


@dataclass(frozen=True)
class LoadedPlugins:
    """The chosen plugins, imported and checked in this process."""

    classes: Mapping[tuple[str, str], type[Plugin]]
    """(kind, reference) -> class."""
    plugin_hash: str

    def get(self, component: Component) -> tuple[type[Any], PluginOptions]:
        """Class and validated options of one of the components that were bootstrapped."""
        label = component_entry(component).label
        try:
            plugin = self.classes[component.kind, component.reference]
        except KeyError:
            raise PluginError(f"{label} is not among the components of the config") from None
        return plugin, validate_options(plugin, label, component.options)

    def create(self, component: Component, *arguments: Any) -> Any:
        """Returns an instance of the component, made with its options and then the arguments of the kind's contract.

        Raises `PluginError` where its `__init__` fails.
        """
        plugin, options = self.get(component)
        with calling(component_entry(component).label, "__init__"):
            return plugin(options, *arguments)

    def identity(self, component: Component) -> str:
        """Identifies a component's results among those of other components: what `plugin_hash` counts, and its
        options."""
        return repr((*_all_facts([component])[0], sorted(component.options.items())))


def bootstrap(components: Sequence[Component], expected_hash: str) -> LoadedPlugins:
    """Loads every chosen component and makes sure that this process has the same ones as the process that resolved
    the config. Call it before weights are read.

    Raises `PluginError` that names, for each component that is missing, differs or cannot be loaded here, what the
    driver has and what is here.
    """
    classes: dict[tuple[str, str], type[Plugin]] = {}
    problems: dict[str, None] = {}
    for component in components:
        problem = _presence_problem(component)
        if problem is None:
            try:
                classes[component.kind, component.reference], _ = create_class(component)
            except DovetailError as error:
                problem = str(error)
        if problem is not None:
            problems[problem] = None
    here = f"{platform.node()} ({sys.executable})"
    if problems:
        raise PluginError("\n".join([f"plugins that the config names are not usable on {here}:", *problems]))
    actual = plugin_hash(components)
    if actual != expected_hash:
        raise PluginError(
            f"the plugins on {here} are not those that the config was resolved with (hash {actual[:12]}, expected "
            f"{expected_hash[:12]}): give every process the same files and distributions; where files were edited"
            f" since the engine started, start it anew. Present here:\n{_listed(components)}"
        )
    return LoadedPlugins(classes, actual)


def plugin_hash(components: Sequence[Component]) -> str:
    """SHA-256 (hexadecimal) over the chosen components as they are installed in this process, whatever their order.

    Kind, name, reference, distribution, the version that is installed here, and the content of every file of the
    distribution count; of a local file its content and that of the files beside it which it imports; options do not.
    """
    facts = sorted({json.dumps(facts) for facts in _all_facts(components)})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def component_contents(component: Component) -> Contents:
    """The files that a component's code is in, as they are in this process; none where they are not here."""
    module = component.reference.rpartition(":")[0]
    if is_file_reference(component.reference):
        return local_contents(Path(module))
    return module_contents(module) if component.distribution is None else installed_contents(component.distribution)


def installed_code(components: Sequence[Component]) -> dict[str, tuple[str | None, Contents]]:
    """The code of components as it is in this process, read once for each owner, which is a distribution, or the
    reference of a local file or module: the distribution's version, and the files."""
    found: dict[str, tuple[str | None, Contents]] = {}
    for component in components:
        owner = _owner(component)
        if owner not in found:
            version = installed_version(component.distribution) if component.distribution else None
            found[owner] = version, component_contents(component)
    return found


def _owner(component: Component) -> str:
    return component.distribution or component.reference


def _all_facts(components: Sequence[Component]) -> list[list[str | None]]:
    code = {owner: (version, files.digest) for owner, (version, files) in installed_code(components).items()}
    return [[one.kind, one.name, one.reference, one.distribution, *code[_owner(one)]] for one in components]


def _listed(components: Sequence[Component]) -> str:
    """A line for each owner of code: its version, the start of its files' hash, and its plugins."""
    lines = []
    for owner, (version, files) in installed_code(components).items():
        names = ", ".join(f"{one.kind} {one.name}" for one in components if _owner(one) == owner)
        lines.append(f"  {owner} {version or ''}".rstrip() + f" (files {files.digest[:12]}): {names}")
    return "\n".join(lines)


def _presence_problem(component: Component) -> str | None:
    what = f"{component.kind} '{component.name}'"
    if is_file_reference(component.reference):
        path = component.reference.rpartition(":")[0]
        return None if Path(path).is_file() else f"{what}: the file {path} is present on the driver, absent here"
    if component.distribution is None:
        return None
    version = installed_version(component.distribution)
    if version == component.version:
        return None
    wanted = f"{component.distribution} {component.version}"
    found = "absent here" if version is None else f"{version} here"
    return (
        f'{what}: {wanted} present on the driver, {found}: pip install "{component.distribution}=={component.version}"'
    )
