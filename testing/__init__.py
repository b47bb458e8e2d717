"""Conformance suites, and what tests of plugins are made of. Public and versioned like a contract.

Every suite is a name of this package, whose module is imported when the name is used::

    from dovetail.testing import DraftWorkerSuite

    class TestMyDrafter(DraftWorkerSuite):
        plugin = MyDrafter
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dovetail.contracts.plugin import ContractVersion

if TYPE_CHECKING:
    from dovetail.testing.acceptance_suite import AcceptanceRuleSuite as AcceptanceRuleSuite
    from dovetail.testing.attention_suite import AttentionBackendSuite as AttentionBackendSuite
    from dovetail.testing.command_suite import CommandSuite as CommandSuite
    from dovetail.testing.dialect_suite import DialectSuite as DialectSuite
    from dovetail.testing.draft_length_suite import DraftLengthSuite as DraftLengthSuite
    from dovetail.testing.draft_suite import DraftWorkerSuite as DraftWorkerSuite
    from dovetail.testing.executor_suite import ExecutorSuite as ExecutorSuite
    from dovetail.testing.executor_suite import ProcessExecutorSuite as ProcessExecutorSuite
    from dovetail.testing.faults import Fault as Fault
    from dovetail.testing.faults import check_fault as check_fault
    from dovetail.testing.faults import run_test as run_test
    from dovetail.testing.format_suite import SavedCheckpoint as SavedCheckpoint
    from dovetail.testing.format_suite import WeightFormatSuite as WeightFormatSuite
    from dovetail.testing.grammar_suite import GrammarSuite as GrammarSuite
    from dovetail.testing.hooks_suite import HooksSuite as HooksSuite
    from dovetail.testing.kv_connector_suite import KVConnectorSuite as KVConnectorSuite
    from dovetail.testing.logits_suite import LogitsProcessorSuite as LogitsProcessorSuite
    from dovetail.testing.model_family_suite import ModelFamilySuite as ModelFamilySuite
    from dovetail.testing.operators_suite import OperatorsSuite as OperatorsSuite
    from dovetail.testing.paged_draft_suite import PagedDraftWorkerSuite as PagedDraftWorkerSuite
    from dovetail.testing.pooler_suite import PoolerSuite as PoolerSuite
    from dovetail.testing.quantization_suite import QuantizationSuite as QuantizationSuite
    from dovetail.testing.quirks import Quirk as Quirk
    from dovetail.testing.route_suite import GeneratingRouteSuite as GeneratingRouteSuite
    from dovetail.testing.route_suite import RouteSuite as RouteSuite
    from dovetail.testing.router_suite import RouterSuite as RouterSuite
    from dovetail.testing.scheduler_suite import SchedulerSuite as SchedulerSuite
    from dovetail.testing.source_suite import ExistingModel as ExistingModel
    from dovetail.testing.source_suite import ModelSourceSuite as ModelSourceSuite
    from dovetail.testing.telemetry_suite import TelemetrySinkSuite as TelemetrySinkSuite
    from dovetail.testing.transport_suite import WeightSender as WeightSender
    from dovetail.testing.transport_suite import WeightTransportSuite as WeightTransportSuite

VERSION = ContractVersion(1, 20)
"""Of this package's modules, which go by it together. A suite may get tests in a minor version: they ask for what the
contract says already."""

_MODULES = {
    "AcceptanceRuleSuite": "acceptance_suite",
    "AttentionBackendSuite": "attention_suite",
    "CommandSuite": "command_suite",
    "DialectSuite": "dialect_suite",
    "DraftLengthSuite": "draft_length_suite",
    "DraftWorkerSuite": "draft_suite",
    "ExecutorSuite": "executor_suite",
    "ProcessExecutorSuite": "executor_suite",
    "ExistingModel": "source_suite",
    "ModelSourceSuite": "source_suite",
    "Fault": "faults",
    "check_fault": "faults",
    "run_test": "faults",
    "GeneratingRouteSuite": "route_suite",
    "Quirk": "quirks",
    "RouteSuite": "route_suite",
    "RouterSuite": "router_suite",
    "GrammarSuite": "grammar_suite",
    "HooksSuite": "hooks_suite",
    "KVConnectorSuite": "kv_connector_suite",
    "LogitsProcessorSuite": "logits_suite",
    "ModelFamilySuite": "model_family_suite",
    "OperatorsSuite": "operators_suite",
    "PagedDraftWorkerSuite": "paged_draft_suite",
    "PoolerSuite": "pooler_suite",
    "QuantizationSuite": "quantization_suite",
    "SavedCheckpoint": "format_suite",
    "WeightFormatSuite": "format_suite",
    "SchedulerSuite": "scheduler_suite",
    "TelemetrySinkSuite": "telemetry_suite",
    "WeightSender": "transport_suite",
    "WeightTransportSuite": "transport_suite",
}
"""Of each name that is imported when it is used."""

__all__ = [
    "VERSION",
    "AcceptanceRuleSuite",
    "AttentionBackendSuite",
    "CommandSuite",
    "DialectSuite",
    "DraftLengthSuite",
    "DraftWorkerSuite",
    "ExecutorSuite",
    "ExistingModel",
    "Fault",
    "GeneratingRouteSuite",
    "GrammarSuite",
    "HooksSuite",
    "KVConnectorSuite",
    "LogitsProcessorSuite",
    "ModelFamilySuite",
    "ModelSourceSuite",
    "OperatorsSuite",
    "PagedDraftWorkerSuite",
    "PoolerSuite",
    "ProcessExecutorSuite",
    "QuantizationSuite",
    "Quirk",
    "RouteSuite",
    "RouterSuite",
    "SavedCheckpoint",
    "SchedulerSuite",
    "TelemetrySinkSuite",
    "WeightFormatSuite",
    "WeightSender",
    "WeightTransportSuite",
    "check_fault",
    "run_test",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(f"{__name__}.{_MODULES[name]}"))[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
