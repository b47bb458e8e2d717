"""Dovetail: an LLM inference and serving framework made of plugins.

The names below are imported on first use, so that `import dovetail` stays instant.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from dovetail.short_waits import import_torch

if TYPE_CHECKING:
    from dovetail.async_engine import AsyncLLMEngine
    from dovetail.config.schema import EngineConfig
    from dovetail.contracts.sampling import BeamSearchParams, SamplingParams
    from dovetail.engine.engine import LLMEngine
    from dovetail.llm import LLM
    from dovetail.outputs import CompletionOutput, RequestOutput

    __version__: str

# Plainly sorted, as a reader searches it, not by kind of name.
__all__ = [  # noqa: RUF022
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LLM",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_ENGINES = ("AsyncLLMEngine", "LLM", "LLMEngine")
"""Names whose modules import torch."""

_HOMES = {
    "AsyncLLMEngine": "dovetail.async_engine",
    "BeamSearchParams": "dovetail.contracts.sampling",
    "CompletionOutput": "dovetail.outputs",
    "EngineConfig": "dovetail.config.schema",
    "LLM": "dovetail.llm",
    "LLMEngine": "dovetail.engine.engine",
    "RequestOutput": "dovetail.outputs",
    "SamplingParams": "dovetail.contracts.sampling",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = metadata.version("dovetail")
    elif name in _HOMES:
        if name in _ENGINES:
            import_torch()
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'dovetail' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
