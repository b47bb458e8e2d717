"""`EngineArgs`: vLLM's names for settings, as an object and as command-line flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, Self

from dovetail.config.foreign_names import ForeignName, ValueType
from dovetail.config.load import load_config
from dovetail.config.resolved import ResolvedConfig
from dovetail.config.tree import nearest
from dovetail.engine.resolving import resolve
from dovetail.vllm.missing import answering
from dovetail.vllm.settings import VLLM_NAMES

_CONVERTERS: Mapping[ValueType, Any] = {"int": int, "float": float}

# `dataclasses.asdict` and `vars` of vLLM's programs need fields; the table has them.
_Fields = make_dataclass("_Fields", [(name, Any, field(default=None)) for name in VLLM_NAMES])


class EngineArgs(_Fields):  # type: ignore[misc, valid-type]
    """One field per name of docs/from-vllm.md; None counts as not given."""

    def __init__(self, model: str | None = None, **given: Any):
        """Raises TypeError for a name that vLLM does not have. What values can be served is said where the engine is
        made."""
        unknown = [name for name, value in given.items() if name not in VLLM_NAMES and value is not None]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {unknown[0]!r}: {nearest(unknown[0], VLLM_NAMES)}")
        super().__init__(model=model, **{name: value for name, value in given.items() if name in VLLM_NAMES})

    def keywords(self) -> dict[str, Any]:
        """What was given, as keywords of `LLM` and of `LLMEngine.from_config`."""
        values = {item.name: vars(self)[item.name] for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def create_engine_config(self) -> ResolvedConfig:
        """What the settings resolve to, with every component chosen; no weight is read. Raises `ConfigError`,
        `PluginError` or `ModelError`."""
        return resolve(load_config(keywords=self.keywords()))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds every name as a flag whose default is None."""
        group = parser.add_argument_group("engine", "vLLM's names for settings")
        for name in VLLM_NAMES.values():
            _add_flag(group, name)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From what a parser found; flags of others are passed over."""
        return cls(**{name: value for name, value in vars(args).items() if name in VLLM_NAMES})


class AsyncEngineArgs(EngineArgs):
    """The same fields, for `AsyncLLM`."""


def _add_flag(group: Any, name: ForeignName) -> None:
    text = (f"sets {name.key}" if name.key else name.refusal).replace("%", "%%")
    if name.type == "switch":
        group.add_argument(name.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif name.type == "strs":
        group.add_argument(name.flag, nargs="+", default=None, help=text)
    else:
        group.add_argument(name.flag, type=_CONVERTERS.get(name.type), default=None, help=text)


__getattr__ = answering(__name__)
