"""The dialect of an engine, created in a client's process. Imports no torch."""

from __future__ import annotations

from dovetail.config.resolved import Component
from dovetail.contracts.dialect import Dialect, DialectSetup
from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import PluginError
from dovetail.registry.calls import calling
from dovetail.registry.components import component_entry, create_class


def create_dialect(facts: EngineFacts) -> Dialect | None:
    """The dialect that the engine's config names; None for an engine without a tokenizer or a dialect. Raises
    `PluginError` where its class cannot be imported or created here."""
    known = facts.dialect
    if known is None:
        return None
    component = Component("dialect", known.name, known.reference, options=known.options)
    plugin, options = create_class(component)
    if not issubclass(plugin, Dialect):
        raise PluginError(f"{component_entry(component).label} is no subclass of dovetail.contracts.dialect.Dialect")
    with calling(component_entry(component).label, "__init__"):
        return plugin(
            options,
            DialectSetup(name=known.name, special_tokens=known.special_tokens, chat_template=known.chat_template),
        )
