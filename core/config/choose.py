"""Chooses one plugin: the one that the config names, or the first candidate that has nothing against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from dovetail.config.foreign_names import hint
from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component
from dovetail.config.schema import AUTO, ComponentSection, known_keys, place_at
from dovetail.config.tree import KeyPath, dotted, flatten, get
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail.contracts.plugin import FixableReason, Plugin, PluginOptions

P = TypeVar("P", bound=Plugin)
Reasons = Callable[[type[P], PluginOptions], Sequence[str]]
"""Asks one candidate what speaks against it."""


@dataclass(frozen=True)
class Chosen:
    """A chosen plugin."""

    component: Component
    plugin: type[Plugin]
    options: PluginOptions


def choose(
    state: Resolution,
    path: KeyPath,
    kind: str,
    section: ComponentSection,
    reasons: Reasons[Any],
    *,
    none_left: type[DovetailError] = ConfigError,
    last_resort: Callable[[type[Any]], bool] = lambda plugin: False,
) -> Chosen:
    """The plugin of `kind` for the section at `path`; decides its `name`, and each option that reads otherwise.

    `reasons` is asked of each candidate. A named plugin never falls back: its reasons are a `ConfigError`. `auto`
    looks among those that take the section's options; where it finds none, `none_left` is raised with every
    candidate's reasons. Candidates for which `last_resort` holds are asked only if no other can be used.
    """
    if section.name != AUTO:
        return _named(state, path, kind, section, reasons)
    return _automatic(state, path, kind, section, reasons, none_left, last_resort)


def _named(state: Resolution, path: KeyPath, kind: str, section: ComponentSection, reasons: Reasons[Any]) -> Chosen:
    name_path = (*path, "name")
    origin = state.layered.origin(name_path)
    base_dir = state.layered.base_dir(name_path)
    try:
        plugin = state.registry.load(kind, section.name, base_dir)
    except PluginError as error:
        raise PluginError(f"{dotted(name_path)} ({origin}): {error}") from error
    _refuse_unknown_options(state, path, section, plugin)
    try:
        component = state.registry.component(kind, section.name, _handed_over(state, path, section, plugin), base_dir)
    except ConfigError as error:
        raise ConfigError(f"{dotted(path)}: {error}") from error
    options = plugin.Options.model_validate(dict(component.options))
    against = list(reasons(plugin, options))
    if against:
        listed = "\n".join(f"  - {reason}" for reason in against)
        raise ConfigError(f"{dotted(name_path)} ({origin}): {section.name!r} cannot be used here:\n{listed}")
    if component.distribution is None and component.reference != section.name:
        state.decide(name_path, component.reference, f"a local file, relative to {base_dir}")
    _decide_options(state, path, _asked(section, plugin), component.options)
    return Chosen(component, plugin, options)


def choose_or_none(
    state: Resolution, path: KeyPath, kind: str, section: ComponentSection, reasons: Reasons[Any], otherwise: str
) -> Chosen | None:
    """As `choose`, for a component that a run can do without: where `auto` finds none, the section becomes null, for
    the reason `otherwise`, with every candidate's reasons."""
    if section.name != AUTO:
        return _named(state, path, kind, section, reasons)
    answers = _ask_all(state, path, kind, section, reasons)
    _note_fixable(state, path, answers)
    if answers.fitting:
        return _first(state, path, kind, section, answers)
    go_without(state, path, section, otherwise, answers.listed)
    return None


def any_fits(state: Resolution, path: KeyPath, kind: str, section: ComponentSection, reasons: Reasons[Any]) -> bool:
    """Whether the named plugin, or for `auto` some candidate, has nothing against `reasons`' question. Decides
    nothing."""
    if section.name == AUTO:
        return bool(_ask_all(state, path, kind, section, reasons).fitting)
    plugin = state.registry.load(kind, section.name, state.layered.base_dir((*path, "name")))
    return not _ask(state, path, section.name, plugin, section, reasons)


def go_without(
    state: Resolution,
    path: KeyPath,
    section: ComponentSection,
    reason: str,
    candidates: tuple[tuple[str, tuple[str, ...]], ...] = (),
) -> None:
    """Decides that a section which says `auto` comes to null."""
    for leaf, _ in flatten(section.model_dump(mode="json"), path):
        of_name = leaf == (*path, "name")
        state.decide(leaf, None, reason, candidates if of_name else ())
    state.fill(path, None)


@dataclass(frozen=True)
class _Answers:
    """What the candidates said."""

    listed: tuple[tuple[str, tuple[str, ...]], ...]
    """Each with its reasons against, those that cannot be loaded last."""
    fitting: tuple[tuple[str, type[Plugin]], ...]
    """Those with none, in the order of preference."""


def _automatic(
    state: Resolution,
    path: KeyPath,
    kind: str,
    section: ComponentSection,
    reasons: Reasons[Any],
    none_left: type[DovetailError],
    last_resort: Callable[[type[Any]], bool],
) -> Chosen:
    answers = _ask_all(state, path, kind, section, reasons, last_resort)
    if not answers.fitting:
        listed = "\n".join(f"  - {name}: {'; '.join(against)}" for name, against in answers.listed)
        listed = listed or "  (none is installed)"
        raise none_left(f"{dotted((*path, 'name'))}: no {kind} of those installed can be used here:\n{listed}")
    _note_fixable(state, path, answers)
    return _first(state, path, kind, section, answers)


def _ask_all(
    state: Resolution,
    path: KeyPath,
    kind: str,
    section: ComponentSection,
    reasons: Reasons[Any],
    last_resort: Callable[[type[Any]], bool] = lambda plugin: False,
) -> _Answers:
    candidates, broken = _candidates(state, kind)
    _refuse_options_of_none(state, path, section, [plugin for _, plugin in candidates])
    candidates.sort(key=lambda candidate: last_resort(candidate[1]))
    answers: list[tuple[str, tuple[str, ...]]] = []
    fitting: list[tuple[str, type[Plugin]]] = []
    for name, plugin in candidates:
        if fitting and last_resort(plugin):
            answers.append((name, ("not asked: it is for models that no other can build",)))
            continue
        answers.append((name, tuple(_ask(state, path, name, plugin, section, reasons))))
        if not answers[-1][1]:
            fitting.append((name, plugin))
    return _Answers((*answers, *broken), tuple(fitting))


def _note_fixable(state: Resolution, path: KeyPath, answers: _Answers) -> None:
    """Notes candidates that would have been chosen but for what the user can mend on this machine."""
    chosen = answers.fitting[0][0] if answers.fitting else None
    for name, against in answers.listed:
        if name == chosen:
            return
        if against and all(isinstance(reason, FixableReason) for reason in against):
            for reason in against:
                state.fixable.setdefault(str(reason), []).append(f"{dotted(path)} {name}")


def _first(state: Resolution, path: KeyPath, kind: str, section: ComponentSection, answers: _Answers) -> Chosen:
    name, plugin = answers.fitting[0]
    only = len(answers.fitting) == 1
    reason = "the only candidate that can be used" if only else "first in preference that can be used"
    state.decide((*path, "name"), name, reason, answers.listed)
    component = state.registry.component(kind, name, _handed_over(state, path, section, plugin))
    _decide_options(state, path, _asked(section, plugin), component.options)
    return Chosen(component, plugin, plugin.Options.model_validate(dict(component.options)))


def _candidates(
    state: Resolution, kind: str
) -> tuple[list[tuple[str, type[Plugin]]], list[tuple[str, tuple[str, ...]]]]:
    """Installed plugins in the order in which they are asked; and those that cannot be loaded, with the reason."""
    entries = state.registry.entries(kind)
    names = [entry.name for entry in entries]
    loaded: list[tuple[str, type[Plugin]]] = []
    broken: list[tuple[str, tuple[str, ...]]] = [
        (entry.qualified_name, (entry.refusal or "",)) for entry in state.registry.refused(kind)
    ]
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


def _ask(
    state: Resolution, path: KeyPath, name: str, plugin: type[Plugin], section: ComponentSection, reasons: Reasons[Any]
) -> Sequence[str]:
    try:
        options = plugin.Options.model_validate(_handed_over(state, path, section, plugin))
    except ValidationError as error:
        issues = [f"option {'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors()]
        return [f"its options do not go with it ({'; '.join(issues)})"]
    try:
        return reasons(plugin, options)
    except Exception as error:
        # A contract that a candidate breaks is its own fault; nobody named it, so it costs a line and no more.
        problem = f"its check failed with {type(error).__name__}: {error}"
        state.warn(f"{plugin.__qualname__} ({name}): {problem} (nothing names it, so the run goes on without)")
        return [problem]


def _asked(section: ComponentSection, plugin: type[Plugin]) -> dict[str, Any]:
    """The plugin's options; a key of the section that its `Options` declare as well reaches both."""
    shared = _option_keys(plugin) & set(known_keys(type(section))) - {"name"}
    own = section.model_dump(mode="json", include=shared, exclude_none=True)
    return {**own, **section.options}


def _handed_over(state: Resolution, path: KeyPath, section: ComponentSection, plugin: type[Plugin]) -> dict[str, Any]:
    """As asked, with paths made absolute."""
    given = _asked(section, plugin)
    for name, field in plugin.Options.model_fields.items():
        key = field.alias or name
        if isinstance(given.get(key), str) and Path in (field.annotation, *get_args(field.annotation)):
            given[key] = str(state.layered.base_dir((*path, key)) / Path(given[key]).expanduser())
    return given


def _decide_options(state: Resolution, path: KeyPath, asked: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """Puts the validated options into the tree; those that the plugin's model reads otherwise are decisions."""
    for leaf, value in flatten(dict(asked)):
        if leaf and get(got, leaf) != value:
            state.decide((*path, *leaf), get(got, leaf), "as the plugin's options read it")
    for key, value in got.items():
        if get(state.values, (*path, key)) is None and key in _section_keys(path):
            state.decide((*path, key), value, "the default of the plugin's option of that name")
        else:
            state.fill((*path, key), value)


def _section_keys(path: KeyPath) -> Mapping[str, Any]:
    place = place_at(path)
    return known_keys(place.section) if place is not None else {}


def _refuse_unknown_options(state: Resolution, path: KeyPath, section: ComponentSection, plugin: type[Plugin]) -> None:
    if _takes_anything(plugin):
        return
    options = _option_keys(plugin)
    for key in section.options:
        if key not in options:
            where = state.layered.origin((*path, key))
            near = hint(key, options | set(known_keys(type(section))))
            raise ConfigError(f"unknown key '{dotted((*path, key))}' ({where}) for {section.name!r}: {near}")


def _refuse_options_of_none(
    state: Resolution, path: KeyPath, section: ComponentSection, plugins: Sequence[type[Plugin]]
) -> None:
    if any(_takes_anything(plugin) for plugin in plugins):
        return
    options = {key for plugin in plugins for key in _option_keys(plugin)}
    for key in section.options:
        if key not in options:
            where = state.layered.origin((*path, key))
            near = hint(key, options | set(known_keys(type(section))))
            raise ConfigError(f"unknown key '{dotted((*path, key))}' ({where}): {near}")


def _option_keys(plugin: type[Plugin]) -> set[str]:
    return {field.alias or name for name, field in plugin.Options.model_fields.items()}


def _takes_anything(plugin: type[Plugin]) -> bool:
    return plugin.Options.model_config.get("extra") == "allow"
