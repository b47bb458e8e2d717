"""Chooses one plugin: the one that the config names, or the first candidate that has nothing against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_args

from pydantic import ValidationError

from dovetail.config.foreign_names import hint
from dovetail.config.resolved import Component
from dovetail.config.schema import AUTO, ComponentSection, NamedSection, known_keys, place_at
from dovetail.config.tree import KeyPath, dotted, flatten, get
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import FixableReason, Plugin, PluginOptions
from dovetail.engine.resolving.resolution import Resolution
from dovetail.registry.calls import calling

P = TypeVar("P", bound=Plugin)
Answers = tuple[tuple[str, tuple[str, ...]], ...]
"""Each candidate with its reasons against; none for those that would do."""


@dataclass(frozen=True)
class Slot(Generic[P]):
    """A place of the config that names one plugin, and what is particular about choosing it."""

    path: KeyPath
    """"*" is a label of the config's."""
    kind: str
    passes_over: Callable[[type[P], Any], str | None] | None = None
    """The rule of `auto`: why it does not ask a candidate about a need; a plugin that is named may be used."""
    last_resort: Callable[[type[P]], bool] | None = None
    """Candidates that are asked only if no other can be used."""
    none_left: type[DovetailError] = ConfigError
    """What is raised where `auto` finds none, unless a run can do without."""

    def at(self, *labels: str) -> Slot[P]:
        """With labels in the places that the path leaves open."""
        given = iter(labels)
        return replace(self, path=tuple(next(given) if key == "*" else key for key in self.path))


@dataclass(frozen=True)
class Chosen(Generic[P]):
    """A chosen plugin."""

    component: Component
    plugin: type[P]
    options: PluginOptions
    asked: Mapping[str, Any]
    """The options as the config gives them."""
    name: str
    """What the section's `name` becomes: of a local file its absolute path."""
    reason: str = ""
    """Why it is chosen; empty where there is nothing to say, since the config names it."""
    answers: Answers = ()
    where: str = ""
    """The config's key that names the plugin, and where its value comes from."""

    def calling(self, call: str) -> AbstractContextManager[None]:
        """Runs its block as `call` of the plugin: what fails there is a `PluginError` with the config's key."""
        return calling(f"{self.where}: {self.component.kind} {self.component.name!r}", call)


Ask = Callable[[type[P], PluginOptions], Sequence[str]]
"""Asks one candidate what speaks against it."""


def choose(state: Resolution, slot: Slot[P], need: Any, *, section: ComponentSection | None = None) -> Chosen[P]:
    """As `Question.choose`."""
    return Question(state, slot, need, section=section).choose()


def go_without(state: Resolution, path: KeyPath, section: ComponentSection, reason: str, answers: Answers = ()) -> None:
    """Decides that a section which says `auto` becomes null."""
    for leaf, _ in flatten(section.model_dump(mode="json"), path):
        state.decide(leaf, None, reason, answers if leaf == (*path, "name") else ())
    state.fill(path, None)


class Question(Generic[P]):
    """What one slot asks of its candidates.

    A named plugin never falls back: its reasons are a `ConfigError`. `auto` looks among those that take the section's
    options. `section`: in place of the config's own. `ask`: in place of `reasons_against` the need, for what is asked
    differently of each candidate.
    """

    def __init__(
        self,
        state: Resolution,
        slot: Slot[P],
        need: Any,
        *,
        section: ComponentSection | None = None,
        ask: Ask[P] | None = None,
    ):
        found = section or state.section(slot.path)
        assert found is not None, f"{dotted(slot.path)} is null, so nobody is asked"
        self.section = found
        self._state = state
        self._slot = slot
        self._need = need
        self._ask = ask or self._ask_need
        self._name_path = (*slot.path, "name")

    def choose(self) -> Chosen[P]:
        """The plugin; decides the section's `name`, and each option that reads otherwise. Raises `slot.none_left` with
        every candidate's reasons where `auto` finds none."""
        chosen = self.pick()
        self.settle(chosen)
        return chosen

    def choose_or_none(self, otherwise: str) -> Chosen[P] | None:
        """As `choose`, for a component that a run can do without: where `auto` finds none, the section becomes null,
        for the reason `otherwise`, with every candidate's reasons."""
        chosen = self._find()
        if isinstance(chosen, Chosen):
            self.settle(chosen)
            return chosen
        go_without(self._state, self._slot.path, self.section, otherwise, chosen)
        return None

    def pick(self) -> Chosen[P]:
        """As `choose`, and decides nothing yet."""
        chosen = self._find()
        if isinstance(chosen, Chosen):
            return chosen
        listed = "\n".join(f"  - {name}: {'; '.join(against)}" for name, against in chosen)
        raise self._slot.none_left(
            f"{dotted(self._name_path)}: no {self._slot.kind} of those installed can be used here:\n"
            f"{listed or '  (none is installed)'}"
        )

    def settle(self, chosen: Chosen[P]) -> None:
        """Decides what `pick` found."""
        if chosen.reason:
            self._state.decide(self._name_path, chosen.name, chosen.reason, chosen.answers, note=True)
        _decide_options(self._state, self._slot.path, chosen.asked, chosen.component.options)

    def any_fits(self) -> bool:
        """Whether the named plugin, or for `auto` some candidate, can serve the need. Decides nothing."""
        if self._is_auto:
            return any(not against for _, _, against in self._ask_all()[0])
        return not self._reasons(self.section.name, self._load_named())

    def _find(self) -> Chosen[P] | Answers:
        """The plugin, or what speaks against all that `auto` may take."""
        return self._first() if self._is_auto else self._named()

    @property
    def _is_auto(self) -> bool:
        return self.section.name == AUTO

    @property
    def _where(self) -> str:
        """The key that names the plugin, and where its value comes from."""
        return f"{dotted(self._name_path)} ({self._state.layered.origin(self._name_path)})"

    def _load(self) -> type[P]:
        base_dir = self._state.layered.base_dir(self._name_path)
        # The registry has checked that it derives from the kind's base class.
        return cast(type[P], self._state.registry.load(self._slot.kind, self.section.name, base_dir))

    def _load_named(self) -> type[P]:
        """As `_load`. Raises `PluginError` with the key and its origin."""
        try:
            return self._load()
        except PluginError as error:
            raise PluginError(f"{self._where}: {error}") from error

    def _named(self) -> Chosen[P]:
        name, base_dir = self.section.name, self._state.layered.base_dir(self._name_path)
        plugin = self._load_named()
        self._refuse_unknown_options([plugin], f" for {name!r}")
        try:
            chosen = self._chosen(name, plugin, base_dir)
        except ConfigError as error:
            raise ConfigError(f"{dotted(self._slot.path)}: {error}") from error
        with chosen.calling("check"):
            against = list(self._ask(plugin, chosen.options))
        if against:
            listed = "\n".join(f"  - {reason}" for reason in against)
            raise ConfigError(f"{self._where}: {name!r} cannot be used here:\n{listed}{self._others()}")
        component = chosen.component
        if component.distribution is not None or component.reference == name:
            return chosen
        return replace(chosen, name=component.reference, reason=f"a local file, relative to {base_dir}")

    def _first(self) -> Chosen[P] | Answers:
        """The first candidate that has nothing against it, or what all have."""
        asked, broken = self._ask_all()
        answers: Answers = (*((name, tuple(against)) for name, _, against in asked), *broken)
        fitting = [(name, plugin) for name, plugin, against in asked if not against]
        self._note_fixable(answers, fitting[0][0] if fitting else None)
        if not fitting:
            return answers
        reason = "the only candidate that can be used" if len(fitting) == 1 else "first in preference that can be used"
        return replace(self._chosen(*fitting[0]), reason=reason, answers=answers)

    def _chosen(self, name: str, plugin: type[P], base_dir: Path | None = None) -> Chosen[P]:
        component = self._state.registry.component(self._slot.kind, name, self._handed_over(plugin), base_dir)
        options = plugin.Options.model_validate(dict(component.options))
        return Chosen(component, plugin, options, self._asked(plugin), name, where=self._where)

    def _ask_all(self) -> tuple[list[tuple[str, type[P], Sequence[str]]], Answers]:
        """Each candidate with its reasons against, in the order of preference; and those that cannot be loaded."""
        candidates, broken = self._candidates()
        self._refuse_unknown_options([plugin for _, plugin in candidates], "")
        last = self._slot.last_resort
        if last is not None:
            candidates = [c for c in candidates if not last(c[1])] + [c for c in candidates if last(c[1])]
        answers: list[tuple[str, type[P], Sequence[str]]] = []
        for name, plugin in candidates:
            against: Sequence[str] = ["not asked: it is for models that no other can build"]
            if last is None or not last(plugin) or all(reasons for _, _, reasons in answers):
                against = self._reasons(name, plugin)
            answers.append((name, plugin, against))
        return answers, broken

    def _options_or_issues(self, plugin: type[P]) -> PluginOptions | list[str]:
        try:
            return plugin.Options.model_validate(self._handed_over(plugin))
        except ValidationError as error:
            issues = [f"option {'.'.join(map(str, issue['loc']))}: {issue['msg']}" for issue in error.errors()]
            return [f"its options do not go with it ({'; '.join(issues)})"]

    def _reasons(self, name: str, plugin: type[P]) -> Sequence[str]:
        """What speaks against one candidate, its options included. What nobody asked for by name needs no options."""
        try:
            passed_over = self._passed_over(plugin)
            if passed_over is not None:
                return [passed_over]
            options = self._options_or_issues(plugin)
            return options if isinstance(options, list) else self._ask(plugin, options)
        except Exception as error:
            # A contract that a candidate breaks is its own fault; nobody named it, so it costs a line and no more.
            problem = f"its check failed with {type(error).__name__}: {error}"
            self._warn(f"{plugin.__qualname__} ({name}): {problem}")
            return [problem]

    def _ask_need(self, plugin: type[P], options: PluginOptions) -> Sequence[str]:
        return reasons_against(plugin, self._need, options, self._state.environment)

    def _passed_over(self, plugin: type[P]) -> str | None:
        rule = self._slot.passes_over
        return rule(plugin, self._need) if rule is not None and self._is_auto else None

    def _others(self) -> str:
        """Where another plugin could be used in place of the one that is named, its name."""
        if isinstance(self.section, NamedSection):
            return ""  # what it does is its own, and nothing that another could do in its place
        section = self.section.model_copy(update={"name": AUTO})
        try:
            asked, _ = Question(self._state, self._slot, self._need, section=section, ask=self._ask)._ask_all()
        except ConfigError:
            return ""
        names = [name for name, _, against in asked if not against]
        return f"\nWhat can be used here: {', '.join(names)}, or auto." if names else ""

    def _candidates(self) -> tuple[list[tuple[str, type[P]]], Answers]:
        """Installed plugins in the order in which they are asked; and those that cannot be loaded, with the reason."""
        registry, kind = self._state.registry, self._slot.kind
        entries = registry.entries(kind)
        loaded: list[tuple[str, type[P]]] = []
        broken = [(entry.qualified_name, (entry.refusal or "",)) for entry in registry.refused(kind)]
        for entry in entries:
            name = registry.name_of(entry)
            try:
                loaded.append((name, cast(type[P], registry.load_entry(entry))))
            except PluginError as error:
                problem = str(error).partition("\n")[0]
                self._warn(problem)
                broken.append((name, (problem,)))
        loaded.sort(key=_by_preference)
        return loaded, tuple(broken)

    def _warn(self, problem: str) -> None:
        warning = f"{problem} (nothing names it, so the run goes on without)"
        if warning not in self._state.warnings:
            self._state.warn(warning)

    def _note_fixable(self, answers: Answers, chosen: str | None) -> None:
        """Notes candidates that would have been chosen but for what the user can mend on this machine."""
        for name, against in answers:
            if name == chosen:
                return
            if against and all(isinstance(reason, FixableReason) for reason in against):
                for reason in against:
                    self._state.fixable.setdefault(str(reason), []).append(f"{dotted(self._slot.path)} {name}")

    def _asked(self, plugin: type[P]) -> dict[str, Any]:
        """The plugin's options; a key of the section that its `Options` declare as well reaches both."""
        shared = _option_keys(plugin) & set(known_keys(type(self.section))) - {"name"}
        own = self.section.model_dump(mode="json", include=shared, exclude_none=True)
        return {**own, **self.section.options}

    def _handed_over(self, plugin: type[P]) -> dict[str, Any]:
        """As asked, with paths made absolute."""
        given = self._asked(plugin)
        for name, option in plugin.Options.model_fields.items():
            key = option.alias or name
            if isinstance(given.get(key), str) and Path in (option.annotation, *get_args(option.annotation)):
                base_dir = self._state.layered.base_dir((*self._slot.path, key))
                given[key] = str(base_dir / Path(given[key]).expanduser())
        return given

    def _refuse_unknown_options(self, plugins: Sequence[type[P]], whose: str) -> None:
        """Raises `ConfigError` for an option that none of `plugins` has."""
        if any(plugin.Options.model_config.get("extra") == "allow" for plugin in plugins):
            return
        options = {key for plugin in plugins for key in _option_keys(plugin)}
        for key in self.section.options:
            if key not in options:
                path = (*self._slot.path, key)
                near = hint(key, options | set(known_keys(type(self.section))), dotted(self._slot.path))
                raise ConfigError(f"unknown key '{dotted(path)}' ({self._state.layered.origin(path)}){whose}: {near}")


def _by_preference(candidate: tuple[str, type[Plugin]]) -> tuple[int, str]:
    return -candidate[1].preference, candidate[0]


def _option_keys(plugin: type[Plugin]) -> set[str]:
    return {option.alias or name for name, option in plugin.Options.model_fields.items()}


def _decide_options(state: Resolution, path: KeyPath, asked: Mapping[str, Any], got: Mapping[str, Any]) -> None:
    """Puts the validated options into the tree; those that the plugin's model reads otherwise are decisions."""
    for leaf, value in flatten(dict(asked)):
        if leaf and get(got, leaf) != value:
            state.decide((*path, *leaf), get(got, leaf), "as the plugin's options read it")
    place = place_at(path)
    section_keys = known_keys(place.section) if place is not None else {}
    for key, value in got.items():
        if get(state.values, (*path, key)) is None and key in section_keys:
            state.decide((*path, key), value, "the default of the plugin's option of that name")
        else:
            state.fill((*path, key), value)
