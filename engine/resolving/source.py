"""The rule about where a model is: the source that its reference means, and the files it finds."""

from __future__ import annotations

import re
from pathlib import Path

from dovetail.config.layers import LayeredConfig
from dovetail.config.schema import AUTO
from dovetail.config.tree import nearest
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.contracts.weights import ModelFiles, ModelSource
from dovetail.engine.resolving.choose import Chosen, choose
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.resolving.slots import SOURCE
from dovetail.registry.registry import Registry
from dovetail.worker.machine.environment import detect_environment

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][\w-]+):(?P<rest>.+)", re.DOTALL)


def refuse_missing_model(layered: LayeredConfig, registry: Registry) -> None:
    """Raises as `find_files` does for a model that is not on this disk and that no source takes, without importing
    torch, as examining the machine does. What a source would download is not asked for."""
    model = layered.config.model
    if (layered.base_dir("model.path") / Path(model.path).expanduser()).exists():
        return
    state = Resolution(layered, registry, detect_environment("cpu"))
    chosen, rest = _choose_source(state)
    if Path(rest).is_absolute():
        with chosen.calling("resolve"):
            chosen.plugin(chosen.options).resolve(rest, model.revision)


def find_files(state: Resolution) -> tuple[Chosen[ModelSource], ModelFiles]:
    """The model source, and the files it finds."""
    chosen, rest = _choose_source(state)
    with chosen.calling("resolve"):
        return chosen, chosen.plugin(chosen.options).resolve(rest, state.config.model.revision)


def _choose_source(state: Resolution) -> tuple[Chosen[ModelSource], str]:
    """The model source, and what it is asked for."""
    model = state.config.model
    scheme, rest = _split_scheme(state, model.path)
    section = model.source
    if scheme is not None and section.name not in (AUTO, scheme):
        origin = state.layered.origin("model.source.name")
        raise ConfigError(
            f"model.path {model.path!r} asks for the source {scheme!r}, model.source ({origin}) for "
            f"{section.name!r}; keep one"
        )
    if scheme is not None:
        section = section.model_copy(update={"name": scheme})
    rest = _anchor(state, scheme, rest, section.name)

    try:
        chosen = choose(state, SOURCE, rest, section=section)
    except ModelError as error:
        raise ModelError(_not_found(state, model.path, str(error))) from None
    if scheme is not None:
        state.decide("model.source.name", chosen.component.name, f"the scheme of {model.path!r}")
    return chosen, rest


def _split_scheme(state: Resolution, reference: str) -> tuple[str | None, str]:
    match = _SCHEME.fullmatch(reference)
    known = {entry.name for entry in state.registry.entries("model_source")}
    if match is None:
        return None, reference
    if match["scheme"] in known:
        return match["scheme"], match["rest"]
    if (state.layered.base_dir("model.path") / reference).exists() or state.config.model.source.name != AUTO:
        return None, reference
    origin = state.layered.origin("model.path")
    hint = nearest(match["scheme"], known)
    raise ConfigError(f"model.path {reference!r} ({origin}): there is no model source {match['scheme']!r}; {hint}")


def _anchor(state: Resolution, scheme: str | None, rest: str, source_name: str) -> str:
    """Makes a path absolute: it counts from the folder of the file that gave it."""
    base_dir = state.layered.base_dir("model.path")
    path = Path(rest).expanduser()
    absolute = (base_dir / path).absolute()
    # What is written like a path is one, there or not; any other word may be a path, and is one if it is there.
    if str(absolute) == rest or not (rest.startswith((".", "~")) or absolute.exists()):
        return rest
    if source_name != AUTO:
        source = state.registry.load("model_source", source_name, state.layered.base_dir("model.source.name"))
        # A hub's "org/name" stays one, even where a folder of that name lies around.
        if issubclass(source, ModelSource) and not source.recognizes(str(absolute)):
            return rest
    whole = f"{scheme}:{absolute}" if scheme is not None else str(absolute)
    state.decide("model.path", whole, f"a path, relative to {base_dir}")
    return str(absolute)


def _not_found(state: Resolution, reference: str, answers: str) -> str:
    origin = state.layered.origin("model.path")
    base_dir = state.layered.base_dir("model.path")
    if (base_dir / Path(reference).expanduser()).exists():
        return f"model.path {reference!r} ({origin}): no model source takes it as asked.\n{answers}"
    return (
        f"model.path {reference!r} ({origin}): there is no such file or folder (looked in {base_dir}), and no model "
        f"source recognizes it. Write a path, or scheme:reference.\n{answers}"
    )
