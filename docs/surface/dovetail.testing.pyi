from dovetail.testing.acceptance_suite import AcceptanceRuleSuite
from dovetail.testing.attention_suite import AttentionBackendSuite
from dovetail.testing.command_suite import CommandSuite
from dovetail.testing.dialect_suite import DialectSuite
from dovetail.testing.draft_length_suite import DraftLengthSuite
from dovetail.testing.draft_suite import DraftWorkerSuite
from dovetail.testing.executor_suite import ExecutorSuite, ProcessExecutorSuite
from dovetail.testing.faults import Fault, check_fault, run_test
from dovetail.testing.format_suite import SavedCheckpoint, WeightFormatSuite
from dovetail.testing.grammar_suite import GrammarSuite
from dovetail.testing.hooks_suite import HooksSuite
from dovetail.testing.kv_connector_suite import KVConnectorSuite
from dovetail.testing.logits_suite import LogitsProcessorSuite
from dovetail.testing.model_family_suite import ModelFamilySuite
from dovetail.testing.operators_suite import OperatorsSuite
from dovetail.testing.paged_draft_suite import PagedDraftWorkerSuite
from dovetail.testing.pooler_suite import PoolerSuite
from dovetail.testing.quantization_suite import QuantizationSuite
from dovetail.testing.quirks import Quirk
from dovetail.testing.route_suite import GeneratingRouteSuite, RouteSuite
from dovetail.testing.router_suite import RouterSuite
from dovetail.testing.scheduler_suite import SchedulerSuite
from dovetail.testing.source_suite import ExistingModel, ModelSourceSuite
from dovetail.testing.telemetry_suite import TelemetrySinkSuite
from dovetail.testing.transport_suite import WeightSender, WeightTransportSuite

__all__ = [
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
    "VERSION",
    "WeightFormatSuite",
    "WeightSender",
    "WeightTransportSuite",
    "check_fault",
    "run_test",
]
VERSION = ...
