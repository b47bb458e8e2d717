"""Chooses one plugin: the one that the config names, or the first candidate that has nothing against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component
from dovetail.config.schema import AUTO, ComponentSection, known_keys
from dovetail.config.tree import KeyPath, dotted, flatten, get, nearest
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail.contracts.plugin import Plugin, PluginOptions

P = TypeVar("P", bound=Plugin)
Reasons = Callable[[type[P], PluginOptions], Sequence[str]]
"""Asks one candidate what speaks against it."""


@dataclass(frozen=True)
class Chosen:
    """A chosen plugin."""

    component: Component
    plugin: type[Plugin]
    options: PluginOptions

    def as_type(self, base: type[P]) -> type[P]:
        """The class, typed as its kind's base; the registry has made sure that it is one."""
        return cast(type[P], self.plugin)


def choose(
    state: Resolution,
    path: KeyPath,
    kind: str,
    section: ComponentSection,
    reasons: Callable[[type[Any], PluginOptions], Sequence[str]],
    *,
    none_left: type[DovetailError] = ConfigError,
    later: Callable[[type[Any]], bool] = lambda plugin: False,
) -> Chosen:
    """The plugin of `kind` for the section at `path`; decides its `name`, and each option that reads otherwise.

    `reasons` is asked of each candidate. A named plugin never falls back: its reasons are a `ConfigError`. Where
    `auto` finds no candidate, `none_left` is raised with every candidate's reasons. Candidates for which `later`
    holds are asked after all others.
    """
    if section.name != AUTO:
        return _named(state, path, kind, section, reasons)
    if section.options:
        raise ConfigError(_option_without_name(state, path, section))
    return _automatic(state, path, kind, reasons, none_left, later)


def _named(state: Resolution, path: KeyPath, kind: str, section: ComponentSection, reasons: Reasons[Any]) -> Chosen:
    name_path = (*path, "name")
    origin = state.layered.origin(name_path)
    base_dir = state.layered.base_dir(name_path)
    try:
        plugin = state.registry.load(kind, section.name, base_dir)
        _refuse_unknown_options(state, path, section, plugin)
        component = state.registry.component(kind, section.name, section.options, base_dir)
    except PluginError as error:
        raise PluginError(f"{dotted(name_path)} ({origin}): {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{dotted(path)}: {error}") from error
    options = plugin.Options.model_validate(dict(component.options))
    against = list(reasons(plugin, options))
    if against:
        listed = "\n".join(f"  - {reason}" for reason in against)
        raise ConfigError(f"{dotted(name_path)} ({origin}): {section.name!r} cannot be used here:\n{listed}")
    if component.distribution is None and component.reference != section.name:
        state.decide(name_path, component.reference, f"a local file, relative to {base_dir}")
    _decide_options(state, path, section.options, component.options)
    return Chosen(component, plugin, options)


def _automatic(
    state: Resolution,
    path: KeyPath,
    kind: str,
    reasons: Reasons[Any],
    none_left: type[DovetailError],
    later: Callable[[type[Any]], bool],
) -> Chosen:
    candidates, broken = _candidates(state, kind)
    candidates.sort(key=lambda item: later(item[1]))
    asked = [(name, plugin, tuple(_ask(plugin, reasons))) for name, plugin in candidates]
    answers = [*((name, against) for name, _, against in asked), *broken]
    fitting = [(name, plugin) for name, plugin, against in asked if not against]
    name_path = (*path, "name")
    if not fitting:
        listed = "\n".join(f"  - {name}: {'; '.join(against)}" for name, against in answers) or "  (none is installed)"
        raise none_left(f"{dotted(name_path)}: no {kind} of those installed can be used here:\n{listed}")
    name, plugin = fitting[0]
    reason = "the only candidate that can be used" if len(fitting) == 1 else "first in preference that can be used"
    state.decide(name_path, name, reason, tuple(answers))
    component = state.registry.component(kind, name)
    _decide_options(state, path, {}, component.options)
    return Chosen(component, plugin, plugin.Options.model_validate(dict(component.options)))


def _candidates(
    state: Resolution, kind: str
) -> tuple[list[tuple[str, type[Plugin]]], list[tuple[str, tuple[str, ...]]]]:
    """Installed plugins in the order in which they are asked; and those that cannot be loaded, with the reason."""
    entries = state.registry.entries(kind)
    names = [entry.name for entry in entries]
    loaded: list[tuple[str, type[Plugin]]] = []
    broken = [(entry.qualified_name, (entry.refusal or "",)) for entry in state.registry.refused(kind)]
    for entry in entries:
        name = entry.qualified_name if names.count(entry.name) > 1 else entry.name
        try:
            loaded.append((name, state.registry.load_entry(entry)))
        except PluginError as error:
            problem = str(error).partition("\n")[0]
            state.warn(f"{problem} (nothing names it, so the run goes on without)")
            broken.append((name, (problem,)))
    loaded.sort(key=lambda item: (-item[1].preference, item[0]))
    return loaded, broken


def _ask(plugin: type[Plugin], reasons: Reasons[Any]) -> Sequence[str]:
    required = [key for key, field in plugin.Options.model_fields.items() if field.is_required()]
    if required:
        return [f"it needs the option {', '.join(required)}: name it to give it"]
    return reasons(plugin, plugin.Options())


def _decide_options(state: Resolution, path: KeyPath, asked: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """Puts the validated options into the tree; those that the plugin's model reads otherwise are decisions."""
    for leaf, value in flatten(dict(asked)):
        if leaf and get(got, leaf) != value:
            state.decide((*path, *leaf), get(got, leaf), "as the plugin's options read it")
    for key, value in got.items():
        state.fill((*path, key), value)


def _refuse_unknown_options(state: Resolution, path: KeyPath, section: ComponentSection, plugin: type[Plugin]) -> None:
    fields = plugin.Options.model_fields
    if plugin.Options.model_config.get("extra") == "allow":
        return
    options = {field.alias or name for name, field in fields.items()}
    for key in section.options:
        if key not in options:
            where = state.layered.origin((*path, key))
            hint = nearest(key, options | set(known_keys(type(section))))
            raise ConfigError(f"unknown key '{dotted((*path, key))}' ({where}) for {section.name!r}: {hint}")


def _option_without_name(state: Resolution, path: KeyPath, section: ComponentSection) -> str:
    key = next(iter(section.options))
    where = state.layered.origin((*path, key))
    hint = nearest(key, known_keys(type(section)))
    return (
        f"unknown key '{dotted((*path, key))}' ({where}): {hint} If it is an option of a plugin, name the plugin in "
        f"{dotted((*path, 'name'))}"
    )
