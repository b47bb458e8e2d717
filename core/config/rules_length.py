"""The rule about a drafter's length: which policy says how many drafts are asked for and verified."""

from __future__ import annotations

from typing import Any, cast

from dovetail.config.resolution import Resolution
from dovetail.config.resolved import Component
from dovetail.config.schema import DrafterSection
from dovetail.config.tree import KeyPath, dotted
from dovetail.contracts.draft_length import DraftLength, LengthNeed
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.needs import reasons_against

_SHARED = "min_confidence"
"""A key of the drafter's section that reaches policies whose options have it too."""


def choose_length(state: Resolution, drafter: KeyPath, section: DrafterSection, need: LengthNeed) -> Component:
    """The policy that the drafter's section names. Raises `ConfigError` where it does not go with the drafter, or with
    the options that are given."""
    path = (*drafter, "length")
    named = section.length
    name, options = (named, {}) if isinstance(named, str) else (named.name, named.options)
    where = f"{dotted(path)} ({state.layered.origin(path)})"
    base_dir = state.layered.base_dir(path)
    try:
        plugin = cast(type[DraftLength], state.registry.load("draft_length", name, base_dir))
        component = state.registry.component(
            "draft_length", name, {**_shared_options(state, drafter, section, name, plugin), **options}, base_dir
        )
    except PluginError as error:
        raise PluginError(f"{where}: {error}") from error
    options_read = plugin.Options.model_validate(dict(component.options))
    reasons = reasons_against(plugin, need, options_read, state.environment)
    if reasons:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        raise ConfigError(f"{where}: {name!r} cannot be used here:\n{listed}")
    return component


def _shared_options(
    state: Resolution, drafter: KeyPath, section: DrafterSection, name: str, plugin: type[DraftLength]
) -> dict[str, Any]:
    """`min_confidence`, which is written with the drafter. Decides its default."""
    path = (*drafter, _SHARED)
    option = plugin.Options.model_fields.get(_SHARED)
    if option is None:
        if section.min_confidence is not None:
            raise ConfigError(
                f"{dotted(path)} {section.min_confidence} ({state.layered.origin(path)}) has no meaning with length "
                f"{name!r}: set length: confidence, or remove it"
            )
        return {}
    if section.min_confidence is not None:
        return {_SHARED: section.min_confidence}
    state.decide(path, option.get_default(call_default_factory=True), f"the default with length: {name}")
    return {}
