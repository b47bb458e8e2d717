"""Dovetail: an LLM inference and serving framework made of plugins.

The names below are imported on first use, so that `import dovetail` stays instant.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.config.schema import EngineConfig
    from dovetail.contracts.lora import LoRARequest
    from dovetail.contracts.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
    from dovetail.contracts.pooling_params import PoolingParams
    from dovetail.contracts.sampling import BeamSearchParams, SamplingParams
    from dovetail.contracts.structured_outputs import StructuredOutputs
    from dovetail.engine.async_engine import AsyncLLMEngine
    from dovetail.engine.engine import LLMEngine
    from dovetail.engine.llm import LLM
    from dovetail.engine.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from dovetail.engine.remote.client import RemoteEngine
    from dovetail.engine.remote.engine_process import EngineProcess
    from dovetail.engine.replicas.engine import ReplicatedEngine

    __version__: str

# Plainly sorted, as a reader searches it, not by kind of name.
__all__ = [  # noqa: RUF022
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineProcess",
    "LLM",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "PositionLogprobs",
    "RemoteEngine",
    "ReplicatedEngine",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "__version__",
]

_HOMES = {
    "AsyncLLMEngine": "dovetail.engine.async_engine",
    "BeamSearchParams": "dovetail.contracts.sampling",
    "ClassificationRequestOutput": "dovetail.engine.pooling.outputs",
    "CompletionOutput": "dovetail.contracts.outputs",
    "EmbeddingRequestOutput": "dovetail.engine.pooling.outputs",
    "EngineConfig": "dovetail.config.schema",
    "EngineProcess": "dovetail.engine.remote.engine_process",
    "LLM": "dovetail.engine.llm",
    "LLMEngine": "dovetail.engine.engine",
    "LoRARequest": "dovetail.contracts.lora",
    "PoolingParams": "dovetail.contracts.pooling_params",
    "PoolingRequestOutput": "dovetail.engine.pooling.outputs",
    "PositionLogprobs": "dovetail.contracts.outputs",
    "RemoteEngine": "dovetail.engine.remote.client",
    "ReplicatedEngine": "dovetail.engine.replicas.engine",
    "RequestMetrics": "dovetail.contracts.outputs",
    "RequestOutput": "dovetail.contracts.outputs",
    "SamplingParams": "dovetail.contracts.sampling",
    "ScoringRequestOutput": "dovetail.engine.pooling.outputs",
    "StructuredOutputs": "dovetail.contracts.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = metadata.version("dovetail")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(_elsewhere(name) or f"module 'dovetail' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _elsewhere(name: str) -> str | None:
    """Where a package with another project's names has `name`, or a module of that name below `dovetail`."""
    from importlib.util import find_spec

    from dovetail.contracts.kinds import NAMES_GROUP

    for point in metadata.entry_points(group=NAMES_GROUP):
        if f"{__name__}.{name}.".startswith(f"{point.value}."):
            continue
        try:
            if name in point.load().__all__:
                return f"{name} is in {point.value}: from {point.value} import {name}"
            if find_spec(f"{point.value}.{name}") is not None:
                return f"module {name} is in {point.value}: import {point.value}.{name}"
        except ImportError:  # such a package can be left out, and says of what it lacks why
            continue
    return None


class _Hints:
    """Says of `from dovetail import NAME` and `import dovetail.MODULE` where that is; of an AttributeError, Python
    shows nothing there."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, name = fullname.partition(".")
        hint = _elsewhere(name) if package == __name__ and name else None
        if hint is not None:
            raise ImportError(hint, name=fullname)


# Last, so that it is asked only for what nobody has.
sys.meta_path.append(_Hints())
