"""The rule about generation defaults: the checkpoint's own, none, or a directory's; with the config's overrides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.config.schema import AUTO
from dovetail.config.tree import nearest
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.tokenization.directory import read_json

NONE = "none"
_FILE = "generation_config.json"
_KEY = "model.generation_config"
_OVERRIDES = "model.override_generation_config"

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys that are fields of `SamplingParams` as they are."""
_OTHERS = ("max_new_tokens", "do_sample", "eos_token_id")


def with_generation_config(state: Resolution, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's config with the generation config that was asked for under "generation_config".

    Raises `ConfigError` for a directory without one, and for overrides that nothing reads or that cannot be served.
    """
    section, own = state.config.model, config.get("generation_config") or {}
    unknown = [name for name in section.override_generation_config if name not in (*_SAMPLING, *_OTHERS)]
    if unknown:
        near = nearest(unknown[0], (*_SAMPLING, *_OTHERS))
        raise ConfigError(f"{_OVERRIDES}: nothing reads a key {unknown[0]!r}; {near}")
    if (section.generation_config == AUTO and not section.override_generation_config) or not isinstance(own, Mapping):
        return config
    asked = {**_asked(state, own), **section.override_generation_config}
    _check(state, asked)
    return {**config, "generation_config": asked}


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation config recommends, as fields of `SamplingParams`."""
    known = {name: generation_config[name] for name in _SAMPLING if generation_config.get(name) is not None}
    if generation_config.get("max_new_tokens") is not None:
        known["max_tokens"] = generation_config["max_new_tokens"]
    if generation_config.get("do_sample") is False:
        known["temperature"] = 0.0
    return known


def _asked(state: Resolution, own: Mapping[str, Any]) -> Mapping[str, Any]:
    asked = state.config.model.generation_config
    if asked == AUTO:
        return own
    if asked == NONE:
        return {}
    directory = state.layered.base_dir(_KEY) / Path(asked).expanduser()
    if not (directory / _FILE).is_file():
        raise ConfigError(
            f"{_KEY} {asked!r} ({state.layered.origin(_KEY)}): there is no {_FILE} in {directory}; give a directory"
            " that has one, or auto, or none"
        )
    state.decide(_KEY, str(directory.absolute()), "a path, relative to the folder of the file that gives it")
    return read_json(directory / _FILE)


def _check(state: Resolution, asked: Mapping[str, Any]) -> None:
    try:
        SamplingParams(**default_sampling(asked))
    except RequestError as error:
        key = _OVERRIDES if state.config.model.override_generation_config else _KEY
        raise ConfigError(f"{key} ({state.layered.origin(key)}): {error}") from error
