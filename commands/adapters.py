"""The low-rank adapter that `--lora` of a command names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dovetail.config.layers import LayeredConfig
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.contracts.lora import LoRARequest
from dovetail.worker.adapters.peft_files import open_adapter

LORA_HELP = "Adapter (LoRA) for all prompts: NAME=PATH or PATH, a folder of PEFT's, or the name of one in lora.modules."


def with_adapter(layered: LayeredConfig, given: Sequence[str]) -> tuple[LayeredConfig, LoRARequest | None]:
    """Returns the configuration of an engine that has the adapter, and what its requests give as `lora_request`; None
    where `given`, the values of `--lora`, is empty.

    Adapters are served whether `lora.enabled` says so or not, and slots hold the adapter's rank unless the config gives
    another `lora.max_rank`. Raises `ConfigError` for several values, for a name that the config gives to another
    adapter, and for a folder that is no adapter.
    """
    if not given:
        return layered, None
    if len(given) > 1:
        raise ConfigError(f"--lora is given {len(given)} times ({', '.join(given)}): one adapter serves all prompts")
    section = layered.config.lora
    if given[0] in section.modules:
        return layered, LoRARequest(given[0])
    name, path = _named(given[0])
    if name in section.modules:
        raise ConfigError(
            f"--lora {given[0]}: lora.modules ({layered.origin(('lora', 'modules', name))}) calls another adapter"
            f" {name!r}: give --lora {name} for that one, or this one another name"
        )
    try:
        rank = open_adapter(path).rank
    except DovetailError as error:
        raise ConfigError(f"--lora {given[0]}: {error}") from error
    is_free = layered.origin("lora.max_rank") == "default"
    changes = {
        "enabled": True,
        "max_rank": max(rank, section.max_rank) if is_free else section.max_rank,
        "modules": {**section.modules, name: str(path)},
    }
    changed = layered.config.model_copy(update={"lora": section.model_copy(update=changes)})
    return replace(layered, config=changed), LoRARequest(name)


def _named(text: str) -> tuple[str, Path]:
    """An adapter without a name has that of its folder."""
    whole = Path(text).expanduser().absolute()
    name, is_named, path = text.partition("=")
    if not is_named or whole.is_dir():
        return whole.name, whole
    if not name.strip() or not path.strip():
        raise ConfigError(f"--lora {text}: give NAME=PATH, or a path alone")
    return name.strip(), Path(path.strip()).expanduser().absolute()


__all__ = ["LORA_HELP", "with_adapter"]
