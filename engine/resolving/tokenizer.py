"""The rules about the tokenizer: where it is, and which of its tokens end an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.engine.resolving.checkpoint import text_config
from dovetail.engine.resolving.resolution import Resolution
from dovetail.engine.tokenization.directory import read_text

_TEMPLATE = "model.chat_template"


def resolve_tokenizer(state: Resolution) -> str | None:
    """The directory of a tokenizer other than the model's own, absolute where it exists."""
    asked = state.config.model.tokenizer
    if asked is None:
        return None
    path = state.layered.base_dir("model.tokenizer") / Path(asked).expanduser()
    if not path.is_dir():
        origin = state.layered.origin("model.tokenizer")
        raise ConfigError(f"model.tokenizer {asked!r} ({origin}): there is no directory {path}")
    state.decide("model.tokenizer", str(path.absolute()), "a path, relative to the folder of the file that gives it")
    return str(path.absolute())


def resolve_chat_template(state: Resolution) -> str | None:
    """Source of the chat template that the config gives in place of the model's own. Raises `ConfigError` where it can
    be neither read nor compiled."""
    asked, origin = state.config.model.chat_template, state.layered.origin(_TEMPLATE)
    if asked is None:
        return None
    if state.config.model.tokenizer_mode in ("none", "mistral"):
        mode = state.config.model.tokenizer_mode
        raise ConfigError(f"{_TEMPLATE} ({origin}): tokenizer_mode {mode} reads no templates; leave one of them out")
    source = asked if "{" in asked else _template_file(state, asked, origin)
    # Most configs give none, and Jinja takes time to import.
    from dovetail.engine.tokenization.chat import ChatTemplate

    try:
        ChatTemplate(source)
    except RequestError as error:
        raise ConfigError(f"{_TEMPLATE} ({origin}): {error}") from error
    return source


def _template_file(state: Resolution, asked: str, origin: str) -> str:
    path = state.layered.base_dir(_TEMPLATE) / Path(asked).expanduser()
    try:
        source = read_text(path)
    except ModelError as error:
        raise ConfigError(
            f"{_TEMPLATE} {asked!r} ({origin}): {error}; give the path of a file, or the template itself, which has {{"
        ) from error
    state.decide(_TEMPLATE, str(path.absolute()), "a path, relative to the folder of the file that gives it")
    return source


def eos_token_ids(state: Resolution, hf_config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's, else the config's. Warns of those outside the vocabulary, which
    are left out."""
    given = _given_eos(hf_config)
    outside = [str(token_id) for token_id in given if not 0 <= token_id < vocab_size]
    if outside:
        state.warn(
            f"eos_token_id {', '.join(outside)} of the model's config is no token of the vocabulary, which has"
            f" {vocab_size}: it is left out, and never ends an output"
        )
    return tuple(token_id for token_id in given if 0 <= token_id < vocab_size)


def _given_eos(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    for config in (hf_config.get("generation_config") or {}, hf_config, text_config(hf_config)):
        found = config.get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, Sequence) and found:
            return tuple(int(token_id) for token_id in found)
    return ()
