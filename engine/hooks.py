"""Hooks: loads the plugins that listen, and calls them so that none can stop the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pluggy

from dovetail.contracts import hooks as specs
from dovetail.contracts.errors import PluginError
from dovetail.registry.entries import Entry
from dovetail.registry.loading import import_object
from dovetail.registry.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HookFailure:
    """A hook plugin that could not be loaded, or raised when it was called."""

    plugin: str
    hook: str | None
    """Name of the hook that raised; None: the plugin could not be loaded."""
    message: str


class HookCaller:
    """Calls hooks, each plugin separately: one that raises is reported once, and the others are still called."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(specs.PROJECT)
        self._manager.add_hookspecs(specs)
        self._listeners: dict[str, list[tuple[str, pluggy.HookCaller]]] = {}
        self._refresh()
        self._failures: dict[tuple[str, str | None], HookFailure] = {}

    @property
    def failures(self) -> list[HookFailure]:
        """Failures so far, at most one per plugin and hook."""
        return list(self._failures.values())

    @property
    def plugins(self) -> list[str]:
        """Names of the plugins that listen, in the order in which they were registered."""
        return [name for name, _ in self._manager.list_name_plugin()]

    def register(self, plugin: object, name: str) -> None:
        """Adds a module or object whose functions are marked with `hookimpl`.

        Raises `PluginError` for functions that match no hook or take arguments that the hook does not have.
        """
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            if self._manager.get_plugin(name) is plugin:
                self._manager.unregister(name=name)
            raise PluginError(f"hooks '{name}' cannot be registered: {error}") from error
        self._refresh()

    def load(self, entry: Entry) -> None:
        """Imports and adds an installed hook plugin. Raises `PluginError`."""
        if entry.refusal is not None:
            raise PluginError(f"{entry.label}: {entry.refusal}")
        self.register(import_object(entry), entry.qualified_name)

    def load_isolated(self, entry: Entry) -> None:
        """As `load`, but a broken plugin is only recorded, with one warning."""
        try:
            self.load(entry)
        except PluginError as error:
            self._report(HookFailure(entry.qualified_name, None, str(error)))

    def listens(self, hook: str) -> bool:
        """Whether any plugin implements `hook`."""
        return bool(self._listeners[hook])

    def call(self, hook: str, **arguments: Any) -> None:
        """Calls every listener of `hook` ("dovetail_engine_started", ...). Never raises for what a listener does."""
        for name, caller in self._listeners[hook]:
            try:
                caller(**arguments)
            except Exception as error:
                self._report(HookFailure(name, hook, f"{type(error).__name__}: {error}"), error)

    def _refresh(self) -> None:
        """Gives each plugin callers of its own: pluggy's shared caller stops at the first plugin that raises."""
        plugins = self._manager.list_name_plugin()
        self._listeners = {hook: [] for hook in vars(specs) if hook.startswith(f"{specs.PROJECT}_")}
        for name, plugin in plugins:
            others = [other for other_name, other in plugins if other_name != name]
            for caller in self._manager.get_hookcallers(plugin) or ():
                alone = self._manager.subset_hook_caller(caller.name, others)
                self._listeners[caller.name].append((name, alone))

    def _report(self, failure: HookFailure, error: Exception | None = None) -> None:
        if (failure.plugin, failure.hook) in self._failures:
            return
        self._failures[failure.plugin, failure.hook] = failure
        if failure.hook is None:
            logger.warning("hook plugin %s is not used: %s", failure.plugin, failure.message)
        else:
            logger.warning(
                "hook plugin %s raised in %s (reported once): %s",
                failure.plugin,
                failure.hook,
                failure.message,
                exc_info=error,
            )


def create_hook_caller(registry: Registry) -> HookCaller:
    """A caller with every installed hook plugin."""
    caller = HookCaller()
    for entry in registry.hook_entries():
        caller.load_isolated(entry)
    return caller
