"""A config with exactly the drafters of some arms, and the stages that these ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.commands import LayeredConfig, explain
from dovetail.contracts.errors import ConfigError


@dataclass(frozen=True)
class Written:
    """A drafter as some config gives it."""

    source: LayeredConfig
    label: str
    """Its name there."""
    changes: Mapping[str, Any]
    """Keys of its section that become others."""


def with_drafters(layered: LayeredConfig, drafters: Mapping[str, Written]) -> LayeredConfig:
    """The config with exactly these drafters, by their new names; stages keep theirs. Raises `ConfigError` where two
    configs mean different drafters by the name of a stage.

    Origins come along, since relative paths count from the file that gave them.
    """
    own = {path: origin for path, origin in layered.origins.items() if path[:2] != ("speculative", "drafters")}
    own = {path: origin for path, origin in own.items() if path[:2] != ("speculative", "default")}
    if not drafters:
        plain = {path: origin for path, origin in own.items() if path[:1] != ("speculative",)}
        return replace(layered, config=layered.config.model_copy(update={"speculative": None}), origins=plain)
    sections: dict[str, Any] = {}
    for name, written in {**drafters, **_stages(drafters)}.items():
        source, key = written.source, written.label
        assert source.config.speculative is not None
        sections[name] = source.config.speculative.drafters[key].model_copy(update=written.changes)
        for path, origin in source.origins.items():
            if path[:3] == ("speculative", "drafters", key):
                own["speculative", "drafters", name, *path[3:]] = origin
    assert layered.config.speculative is not None
    speculative = layered.config.speculative.model_copy(update={"drafters": sections, "default": None})
    return replace(layered, config=layered.config.model_copy(update={"speculative": speculative}), origins=own)


def _stages(drafters: Mapping[str, Written]) -> dict[str, Written]:
    found: dict[str, Written] = {}
    for name, written in drafters.items():
        for label in _stages_of(written):
            stage = Written(written.source, label, {})
            if _section(found.setdefault(label, stage)) != _section(stage) or label in drafters:
                raise ConfigError(
                    f"the stage {label!r} of {name} is another drafter elsewhere in the experiment: arms that run in"
                    " one engine share their stages, so name the two differently"
                )
    return found


def _section(written: Written) -> Any:
    assert written.source.config.speculative is not None
    return written.source.config.speculative.drafters[written.label]


def _stages_of(written: Written) -> tuple[str, ...]:
    """Labels of the drafters that a drafter asks. A config that cannot be resolved is refused with its reason later."""
    speculative = written.source.config.speculative
    if speculative is None or len(speculative.drafters) == 1:
        return ()
    # Who is the default is the config's own question, which arms do not ask.
    config = written.source.config.model_copy(update={"speculative": speculative.model_copy(update={"default": None})})
    resolved = explain(replace(written.source, config=config)).resolved
    if resolved is None or resolved.speculation is None:
        return ()
    return resolved.speculation.drafters[written.label].stages
