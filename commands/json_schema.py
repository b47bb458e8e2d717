"""JSON Schema of the config file, with the options of every installed plugin inside."""

from __future__ import annotations

from typing import Any

from dovetail.config.schema import AUTO, PLACES, EngineConfig, Place
from dovetail.contracts.errors import PluginError
from dovetail.contracts.plugin import Plugin
from dovetail.registry.entries import Entry
from dovetail.registry.registry import Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = r"^.+:[A-Za-z_][\w.]*$"
"""`pkg.mod:Class`, `./file.py:Class`, `dist:name`."""


def config_schema(registry: Registry) -> tuple[dict[str, Any], list[str]]:
    """The schema, and one line for each plugin that could not be imported and whose options are therefore missing."""
    schema = EngineConfig.model_json_schema()
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    warnings: list[str] = []
    for place in PLACES:
        if place.kind is not None:
            definitions[_definition_name(place)] = _component(registry, place, definitions, warnings)
            _slot(schema, definitions, place, {"$ref": f"#/$defs/{_definition_name(place)}"})
    schema["properties"]["model"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/ModelSection"}]}
    _loosen_processors(schema["properties"]["logits_processors"])
    schema.pop("title", None)
    return {"$schema": DIALECT, "title": "Dovetail engine config", **schema}, warnings


def _definition_name(place: Place) -> str:
    return f"component.{'.'.join(place.path).replace('*', 'any')}"


def _loosen_processors(mapping: dict[str, Any]) -> None:
    """Logits processors stand in a list as well, and in the mapping the key may be the name."""
    item = mapping["additionalProperties"]
    keyed = {"anyOf": [item, {"type": "object", "not": {"required": ["name"]}}, {"type": "null"}]}
    forms = [{"type": "string"}, {"type": "array", "items": item}, {**mapping, "additionalProperties": keyed}]
    mapping.clear()
    mapping["anyOf"] = forms


def _slot(schema: dict[str, Any], definitions: dict[str, Any], place: Place, reference: dict[str, Any]) -> None:
    """Puts the reference where the tree has the component."""
    owners: dict[tuple[str, ...], dict[str, Any]] = {
        (): schema,
        ("model",): definitions["ModelSection"],
        ("speculative",): definitions["SpeculativeSection"],
        ("server",): definitions["ServerSection"],
    }
    if place.path[:-1] not in owners and place.path[-1] != "*":
        return  # inside another component, whose own properties refer to it
    value = {"anyOf": [reference, {"type": "null"}]} if place.nullable else reference
    if place.path[-1] == "*":
        holder = owners[place.path[:-2]]["properties"][place.path[-2]]
        holder["items" if holder["type"] == "array" else "additionalProperties"] = value
    else:
        owners[place.path[:-1]]["properties"][place.path[-1]] = value


def _component(registry: Registry, place: Place, definitions: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """A name, or a mapping that is told apart by its name."""
    own = _own_properties(place)
    forms: list[dict[str, Any]] = []
    short: list[str] = []
    options_of_any: dict[str, list[Any]] = {}
    entries = registry.entries(place.kind or "")
    for entry in entries:
        try:
            plugin = registry.load_entry(entry)
        except PluginError as error:
            warnings.append(str(error).partition("\n")[0])
            continue
        properties, required = _options(entry, plugin, definitions)
        for key, value in properties.items():
            options_of_any.setdefault(key, []).append(value)
        form = _form({**properties, **own}, {"enum": _names(registry, entry)}, ["name", *required])
        forms.append({"description": f"{entry.name} of {entry.origin}", **form})
        if not required:
            short += _names(registry, entry)
    if not place.section.model_fields["name"].is_required():
        options = {key: {"anyOf": values} for key, values in options_of_any.items()}
        forms.append(_form({**options, **own}, {"const": AUTO}, []))
        short.append(AUTO)
    installed = [name for entry in entries for name in _names(registry, entry)]
    reference = {"type": "string", "pattern": _REFERENCE, "not": {"enum": installed}}
    forms.append({**_form(own, reference, ["name"]), "additionalProperties": True})
    return {"oneOf": [{"enum": sorted(set(short))}, reference, *forms]}


def _names(registry: Registry, entry: Entry) -> list[str]:
    """What a config may write for a plugin. A name of several is not refused here: the registry names them all."""
    alike = [other for other in registry.entries(entry.kind) if other.name == entry.name]
    is_taken = not entry.is_own and any(other.is_own for other in alike)
    return [entry.qualified_name] if is_taken else [entry.name, entry.qualified_name]


def _form(properties: dict[str, Any], name: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**properties, "name": name},
        "required": required,
        "additionalProperties": False,
    }


def _own_properties(place: Place) -> dict[str, Any]:
    properties: dict[str, Any] = place.section.model_json_schema()["properties"]
    for inner in PLACES:
        if inner.kind is not None and inner.path[:-1] == place.path and inner.path[-1] in properties:
            reference = {"$ref": f"#/$defs/{_definition_name(inner)}"}
            value = {"anyOf": [reference, {"type": "null"}]} if inner.nullable else reference
            properties[inner.path[-1]] = {**properties[inner.path[-1]], **value}
    return {key: value for key, value in properties.items() if key != "name"}


def _options(entry: Entry, plugin: type[Plugin], definitions: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Properties of a plugin's options and the required ones; nested models join the definitions."""
    prefix = f"{entry.kind}.{entry.qualified_name}."
    options = plugin.Options.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    for name, definition in options.get("$defs", {}).items():
        definitions[prefix + name] = definition
    return options.get("properties", {}), list(options.get("required", ()))
