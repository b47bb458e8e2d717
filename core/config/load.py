"""From defaults, file, keywords and overrides to one typed tree in which each value knows where it came from.

Precedence, lowest first: defaults, the config file (or mapping), then keywords, other projects' names and ``-o``
together.
Within the last three nothing outranks anything: two that give one key different values are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dovetail.config.files import FileContent, parse_value, read_file
from dovetail.config.foreign_names import VALUE, ForeignName, foreign_names, hint, project_of
from dovetail.config.layers import DEFAULT, Layer, LayeredConfig, Merge, Origin, are_related, replaced_unit, unite
from dovetail.config.manifest import RecordedPlugin, is_manifest, read_manifest
from dovetail.config.schema import (
    OFF,
    PLACES,
    ComponentSection,
    EngineConfig,
    Place,
    is_label,
    known_keys,
    place_at,
    shown,
)
from dovetail.config.tree import KeyPath, dotted, flatten, nearest, nested
from dovetail.contracts.errors import ConfigError

OriginText = Callable[[KeyPath], str]
_ADDED_DRAFTER = "draft"
"""The label that vLLM's names for speculation use as well, so that `--num-speculative-tokens` speaks of the same."""


def load_config(
    config: str | Path | Mapping[str, Any] | EngineConfig | LayeredConfig | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    base_dir: Path | None = None,
    speculative: str | None = None,
) -> LayeredConfig:
    """Reads every layer and checks keys and values, not whether they go together.

    Args:
        config: path of a file (YAML, TOML, JSON or a run's manifest), a mapping, or an `EngineConfig`.
        keywords: sections of the tree, or other projects' names; None counts as not given, but for a section that may
            be null.
            `speculative` may be a name, as in `speculative` below.
        overrides: "dotted.key=value" with the value in YAML, as `-o` takes them.
        flags: other projects' names as command-line flags; they differ from keywords in what messages call them.
        base_dir: folder against which relative paths in mappings and keywords count (a file that holds configs,
            say); None: the working directory.
        speculative: what `--speculative` says: the drafter of the config with that label becomes the default, "off"
            leaves requests without one, any other name is a draft worker's, which is added under the label `draft`.

    Raises `ConfigError` that names the key, its origin and the nearest known key.
    """
    overrides = _as_options(overrides)
    if isinstance(config, LayeredConfig):
        if keywords or overrides or flags or speculative:
            raise ConfigError("a configuration that is loaded already takes no further keywords or overrides")
        return config
    folder = base_dir if base_dir is not None else Path.cwd()
    base, recorded = _base_layer(config, folder)
    merge = Merge()
    merge.add(base)
    keywords = dict(keywords or {})
    drafters: list[Layer] = []
    for name, text in ((speculative, "--speculative"), (_drafter_keyword(keywords), "keyword speculative")):
        if name is not None:
            drafters.append(_drafter_layer(name, base.tree.get("speculative") or {}, text))
    given = [*_keyword_layers(keywords, folder, base), *_override_layers(overrides), *_flag_layers(flags or {}, base)]
    merge.add(unite([*given, *drafters]))
    return LayeredConfig(_validate(merge), merge.origins, tuple(merge.dropped), recorded)


def _base_layer(
    config: str | Path | Mapping[str, Any] | EngineConfig | None, folder: Path
) -> tuple[Layer, tuple[RecordedPlugin, ...]]:
    if config is None:
        return Layer({}, {}), ()
    if isinstance(config, EngineConfig):
        return _layer(config.model_dump(exclude_unset=True), "EngineConfig", folder), ()
    if isinstance(config, Mapping):
        return _layer(config, "config mapping", folder), ()
    if not isinstance(config, str | Path):
        raise ConfigError(f"config must be the path of a file, a mapping or an EngineConfig, got {config!r}")
    path = Path(config).expanduser()
    content = read_file(path)
    if is_manifest(content.data):
        manifest = read_manifest(content.data, path.name)
        return _layer(manifest.values, path.name, path.absolute().parent), manifest.plugins
    return _layer(content.data, path.name, path.absolute().parent, content), ()


def _layer(tree: Any, text: str, base_dir: Path, content: FileContent | None = None) -> Layer:
    lines = content.lines if content is not None else {}

    def origin_text(path: KeyPath) -> str:
        while path not in lines and path:
            path = path[:-1]
        return f"{text}:{lines[path]}" if path in lines else text

    plain = _normalise(tree, (), origin_text)
    origins = {path: Origin(origin_text(path), base_dir) for path, _ in flatten(plain) if path}
    return Layer(plain, origins)


def _drafter_keyword(keywords: dict[str, Any]) -> str | None:
    """Takes `speculative` out of the keywords where it is a mere name."""
    name: str | None = keywords.pop("speculative") if isinstance(keywords.get("speculative"), str) else None
    return name


def _is_section(name: str, value: Any) -> bool:
    """Whether the keyword means a section, where another project may have given another meaning to the name."""
    place = place_at((name,))
    if value is None:
        return place is not None and place.nullable
    return name in known_keys(EngineConfig) and not (isinstance(value, list) and project_of(name) is not None)


def _keyword_layers(keywords: Mapping[str, Any], folder: Path, base: Layer) -> Iterator[Layer]:
    sections = known_keys(EngineConfig)
    for name, value in keywords.items():
        if _is_section(name, value):
            yield _layer({name: value}, "keyword", folder)
        elif value is None:
            continue
        elif (project := project_of(name)) is not None:
            yield from _foreign_layers(project.names[name], value, f"{project.title} name {name}", base)
        else:
            near = nearest(name, [*sections, *foreign_names()]) if name else ""
            raise ConfigError(f"unknown keyword {name!r}: {near}")


def _flag_layers(flags: Mapping[str, Any], base: Layer) -> Iterator[Layer]:
    for name, value in flags.items():
        entry = foreign_names()[name]
        negative = entry.negative_flag if value is False else None
        yield from _foreign_layers(entry, value, negative or entry.flag, base)


def _foreign_layers(name: ForeignName, value: Any, text: str, base: Layer) -> Iterator[Layer]:
    for path, translated in name.translate(value, text):
        if name.sink:
            given = {option for option, meant in name.sink.items() if meant is VALUE}
            yield _sink_layer(translated, given, text, base)
        else:
            yield _layer(nested(path, translated), text, Path.cwd())


def _sink_layer(sink: Mapping[str, Any], given: Collection[str], text: str, base: Layer) -> Layer:
    """The config file's telemetry sinks and this one. Where the file has it too, the file's options stay but those that
    are `given`."""
    sinks = list(base.tree.get("telemetry") or ())
    index = next((i for i, other in enumerate(sinks) if other.get("name") == sink["name"]), len(sinks))
    known = sinks[index] if index < len(sinks) else {}
    changed = {option: value for option, value in sink.items() if option in given or option not in known}
    sinks[index : index + 1] = [{**known, **changed}]
    origins = {path: origin for path, origin in base.origins.items() if path[0] == "telemetry"}
    origins |= {("telemetry", str(index), option): Origin(text, Path.cwd()) for option in changed}
    return Layer({"telemetry": sinks}, origins)


def _drafter_layer(name: str, section: Mapping[str, Any], text: str) -> Layer:
    """What `--speculative NAME` gives, over the config file's section `speculative`."""
    known = section.get("drafters") or {}
    if name == OFF:
        tree: dict[str, Any] = {"speculative": {"default": None}} if known else {}
    elif name in known:
        tree = {"speculative": {"default": name}}
    else:
        tree = {"speculative": {"drafters": {_ADDED_DRAFTER: {"name": name}}, "default": _ADDED_DRAFTER}}
    return _layer(tree, text, Path.cwd())


def _as_options(given: object) -> list[str]:
    items = list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else None
    wrong = [given] if items is None else [item for item in items if not isinstance(item, str)]
    if items is None or wrong:
        raise ConfigError(f"options must be a list of texts like 'scheduler.name=priority', got {wrong[0]!r}")
    return items


def _override_layers(overrides: Sequence[str]) -> Iterator[Layer]:
    for override in overrides:
        key, separator, text = override.partition("=")
        path = tuple(key.strip().split("."))
        if not separator or not all(path):
            raise ConfigError(f"-o {override!r}: write section.key=value, for example -o scheduler.name=priority")
        try:
            value = parse_value(text)
        except ValueError as error:
            raise ConfigError(f"-o {override!r}: the value is not YAML: {error}") from error
        if replaced_unit(path) != path:
            raise ConfigError(f"-o {override!r}: telemetry is a list; give it whole, as in -o 'telemetry=[log]'")
        yield _layer(nested(path, value), "-o", Path.cwd())


def _validate(merge: Merge) -> EngineConfig:
    try:
        return EngineConfig.model_validate(merge.tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_problem(issue, merge.origins) for issue in error.errors())) from None


def _problem(issue: Any, origins: Mapping[KeyPath, Origin]) -> str:
    path = tuple(str(part) for part in issue["loc"] if part != "[key]")
    near = [origin.text for p, origin in origins.items() if are_related(p, path)]
    near += [origin.text for p, origin in origins.items() if p[: len(path) - 1] == path[:-1]]
    where = near[0] if near else DEFAULT
    if issue["type"] == "missing":
        return f"{dotted(path)} is missing ({where} gives what stands beside it): add it"
    return f"{dotted(path)}: {issue['msg']}, got {shown(path, issue['input'])!r} ({where})"


def _normalise(value: Any, path: KeyPath, origin: OriginText) -> Any:
    """Expands strings that stand for a section (`attention: sdpa`), and empty sections.

    Keys that a component section does not declare are left alone: they are the plugin's options.
    Raises `ConfigError` for an unknown key, with its origin and the nearest key, or for data of another shape.
    """
    if path == ("logits_processors",) and isinstance(value, str | list | tuple):
        value = _by_name(value, origin(path))
    place = place_at(path)
    if place is not None:
        return _normalise_section(value, path, place, origin)
    if isinstance(value, Mapping):
        _require_string_keys(value, path, origin)
        return {key: _normalise(item, (*path, key), origin) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normalise(item, (*path, str(index)), origin) for index, item in enumerate(value)]
    return value


def _normalise_section(value: Any, path: KeyPath, place: Place, origin: OriginText) -> Any:
    if value is None:
        # A section whose lines are all commented out reads as null.
        return None if place.nullable else {}
    if isinstance(value, str) and place.shorthand is not None:
        value = {place.shorthand: value}
    if isinstance(value, place.section):
        value = value.model_dump(exclude_unset=True)
    if not isinstance(value, Mapping):
        short = f"a string (its {place.shorthand}) or " if place.shorthand is not None else ""
        raise ConfigError(f"{_where(path)} must be {short}a mapping of keys, got {value!r} ({origin(path)})")
    _require_string_keys(value, path, origin)
    if not issubclass(place.section, ComponentSection):
        for key in value:
            if key not in known_keys(place.section):
                near = _hint(key, place)
                raise ConfigError(f"unknown key {dotted((*path, key))!r} ({origin((*path, key))}): {near}")
    return {key: _normalise(item, (*path, key), origin) for key, item in value.items()}


def _by_name(value: str | list[Any] | tuple[Any, ...], origin: str) -> dict[str, Any]:
    """Logits processors as a list: requests find each by the name of its plugin."""
    found: dict[str, Any] = {}
    for item in [value] if isinstance(value, str) else value:
        name = item.get("name") if isinstance(item, Mapping) else item
        if not isinstance(name, str) or not is_label(name):
            raise ConfigError(
                f"logits_processors: {item!r} ({origin}) has no plain name by which requests could find it; write "
                "`logits_processors: {my_name: {name: ...}}`"
            )
        if name in found:
            raise ConfigError(f"logits_processors names {name!r} twice ({origin}); give each a name in a mapping")
        found[name] = item
    return found


def _hint(key: str, place: Place) -> str:
    near = hint(key, known_keys(place.section))
    elsewhere = [dotted((*p.path, key)) for p in PLACES if key in known_keys(p.section) and key != "name"]
    if elsewhere and "did you mean" not in near:
        return f"did you mean {' or '.join(repr(other) for other in elsewhere)}?"
    return near


def _require_string_keys(value: Mapping[Any, Any], path: KeyPath, origin: OriginText) -> None:
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(
                f"key {key!r} in {_where(path)} ({origin(path)}) is not a string; "
                "YAML reads on, off, yes, no and numbers as values: quote the key"
            )


def _where(path: KeyPath) -> str:
    return dotted(path) or "the configuration"
