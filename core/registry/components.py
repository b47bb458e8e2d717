"""From a chosen component to its class and options, in any process."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from dovetail.config.resolved import Component
from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.registry.entries import Entry, host_major
from dovetail.registry.loading import load_entry


def component_entry(component: Component) -> Entry:
    """The component as an entry for the loader."""
    return Entry(
        component.kind,
        component.name,
        component.reference,
        host_major(component.kind),
        component.distribution,
        component.version,
    )


def create_class(component: Component) -> tuple[type[Plugin], PluginOptions]:
    """The class behind a component and its validated options; needs no registry, so every process can call it.

    Raises `PluginError` where the plugin cannot be loaded here, `ConfigError` for options that it does not take.
    """
    entry = component_entry(component)
    plugin = load_entry(entry)
    return plugin, validate_options(plugin, entry.label, component.options)


def validate_options(plugin: type[Plugin], label: str, options: Mapping[str, Any]) -> PluginOptions:
    """Validates options with the plugin's own model. Raises `ConfigError` with one line per bad option, and
    `PluginError` where the model itself is at fault."""
    try:
        return plugin.Options.model_validate(dict(options))
    except ValidationError as error:
        lines = [_describe(dict(problem), plugin.Options) for problem in error.errors()]
        raise ConfigError("\n".join(f"{label}: {line}" for line in lines)) from error
    except Exception as error:  # a validator of the plugin's own that raises what pydantic does not expect
        raise PluginError(f"{label}: its Options cannot be validated: {type(error).__name__}: {error}") from error


def dump_options(options: PluginOptions, label: str) -> dict[str, Any]:
    """Options as plain data from which any process makes the same options again."""
    try:
        plain = options.model_dump(mode="json", by_alias=True)
        survives = type(options).model_validate(plain) == options
    except ValidationError:
        survives = False
    except Exception as error:  # a value without JSON, or a serializer of the plugin's own
        raise PluginError(
            f"{label}: its Options cannot be written as JSON, so they cannot travel to workers: use plain types in "
            f"{type(options).__qualname__} ({type(error).__name__}: {error})"
        ) from error
    if not survives:
        raise PluginError(
            f"{label}: its Options do not survive model_dump(mode='json') and model_validate, so they cannot travel "
            f"to workers: use plain types in {type(options).__qualname__}"
        )
    return plain


def _describe(problem: dict[str, Any], model: type[PluginOptions]) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    known = [field.alias or name for name, field in model.model_fields.items()]
    if problem["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5) if len(location) == 1 else []
        hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
        return f"unknown option '{key}'{hint} (options: {', '.join(known) or 'none'})"
    if problem["type"] == "missing":
        field = model.model_fields.get(key)
        about = " ".join((field.description or "").split()) if field is not None else ""
        return f"option '{key}' is required{f': {about}' if about else ''}"
    if not key:
        return str(problem["msg"])
    return f"option '{key}': {problem['msg']}, got {problem['input']!r}"
