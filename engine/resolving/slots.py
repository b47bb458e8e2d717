"""Every place of the config that names a plugin: one row each. The rules make the need, `choose` does the rest."""

from __future__ import annotations

from typing import Any

from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.dialect import Dialect
from dovetail.contracts.draft_length import DraftLength
from dovetail.contracts.errors import ModelError
from dovetail.contracts.executor import Executor
from dovetail.contracts.grammar import Grammar
from dovetail.contracts.kv_connector import KVConnector
from dovetail.contracts.logits import LogitsProcessor
from dovetail.contracts.model import ModelFamily, ModelNeed
from dovetail.contracts.operators import Operators
from dovetail.contracts.pooling import Pooler, PoolerNeed
from dovetail.contracts.quantization import QuantizationMethod, QuantizationNeed
from dovetail.contracts.route import Route
from dovetail.contracts.router import Router
from dovetail.contracts.scheduler import Scheduler
from dovetail.contracts.speculation import AcceptanceRule, DraftWorker
from dovetail.contracts.telemetry import TelemetrySink
from dovetail.contracts.weight_transport import WeightTransport
from dovetail.contracts.weights import ModelFiles, ModelSource, WeightFormat
from dovetail.engine.resolving.choose import Slot


def _another_reference(source: type[ModelSource], reference: str) -> str | None:
    return None if source.recognizes(reference) else f"it does not recognize {reference!r}"


def _other_files(weight_format: type[WeightFormat], files: ModelFiles) -> str | None:
    return None if weight_format.recognizes(files) else f"it finds none of its files in {files.path}"


def architectures_of(hf_config: Any) -> list[str]:
    """What a config asks to be built."""
    return [str(name) for name in hf_config.get("architectures") or ()]


def _other_architectures(family: type[ModelFamily], need: ModelNeed) -> str | None:
    asked = architectures_of(need.config)
    if not family.architectures or any(name in family.architectures for name in asked):
        return None
    return f"it does not build {' or '.join(asked) or 'a model without architectures in its config'}"


def _decides_by_check_alone(family: type[ModelFamily]) -> bool:
    return not family.architectures


def _rounds_anew(method: type[QuantizationMethod], need: QuantizationNeed) -> str | None:
    if method.capabilities.packed_formats & need.packed_formats:
        return None
    formats = ", ".join(sorted(need.packed_formats))
    return f"the checkpoint's weights are {formats}, which it does not hold as they are"


def _not_for_drafters(method: type[QuantizationMethod], need: QuantizationNeed) -> str | None:
    return None if method.capabilities.for_drafters else "auto does not take it for drafters"


def _another_mode(pooler: type[Pooler], need: PoolerNeed) -> str | None:
    if need.mode is None or need.mode in pooler.capabilities.modes:
        return None
    return f"states of this model are pooled by {need.mode!r}, unless the config names another pooler"


def _must_be_named(rule: type[AcceptanceRule], need: Any) -> str | None:
    if not rule.capabilities.lossless:
        return "it is lossy: it must be asked for by name"
    return None if rule.capabilities.sampling else "it serves greedy requests only: it must be asked for by name"


SOURCE = Slot[ModelSource](("model", "source"), "model_source", _another_reference, none_left=ModelError)
WEIGHT_FORMAT = Slot[WeightFormat](("model", "weight_format"), "weight_format", _other_files, none_left=ModelError)
FAMILY = Slot[ModelFamily](
    ("model", "family"), "model_family", _other_architectures, _decides_by_check_alone, none_left=ModelError
)
QUANTIZATION = Slot[QuantizationMethod](("model", "quantization"), "quantization", _rounds_anew)
OPERATORS = Slot[Operators](("model", "operators"), "operators")
EXECUTOR = Slot[Executor](("executor",), "executor")
ATTENTION = Slot[AttentionBackend](("attention",), "attention_backend")
SCHEDULER = Slot[Scheduler](("scheduler",), "scheduler")
DRAFTER = Slot[DraftWorker](("speculative", "drafters", "*"), "draft_worker")
DRAFT_ATTENTION = Slot[AttentionBackend](("speculative", "drafters", "*", "attention"), "attention_backend")
DRAFT_QUANTIZATION = Slot[QuantizationMethod](("model", "quantization"), "quantization", _not_for_drafters)
"""Of layers that a drafter builds by itself, in the resolution of its own model."""
LENGTH = Slot[DraftLength](("speculative", "drafters", "*", "length"), "draft_length")
ACCEPTANCE = Slot[AcceptanceRule](("speculative", "acceptance"), "acceptance_rule", _must_be_named)
RULE = Slot[AcceptanceRule](("speculative", "rules", "*"), "acceptance_rule")
DIALECT = Slot[Dialect](("dialect",), "dialect")
GRAMMAR = Slot[Grammar](("grammar",), "grammar")
POOLER = Slot[Pooler](("pooling", "*"), "pooler", _another_mode)
KV_CONNECTOR = Slot[KVConnector](("kv_connector",), "kv_connector")
WEIGHT_TRANSPORT = Slot[WeightTransport](("weight_transport",), "weight_transport")
PROCESSOR = Slot[LogitsProcessor](("logits_processors", "*"), "logits_processor")
ROUTER = Slot[Router](("server", "router"), "router")
ROUTE = Slot[Route](("server", "routes", "*"), "route")
TELEMETRY = Slot[TelemetrySink](("telemetry", "*"), "telemetry_sink")
