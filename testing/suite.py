"""What all conformance suites have in common: one attribute, `plugin`, names what is tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import dovetail.testing
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Plugin
from dovetail.registry.entries import HOOKS_KIND
from dovetail.testing._checks import check_contract
from dovetail.testing.capabilities import UNDECLARED, Capability
from dovetail.testing.quirks import Quirk, expect_failures, reason_against_quirks


@dataclass(frozen=True)
class SuiteOf:
    """The suite of a kind."""

    name: str
    """In `dovetail.testing`."""
    needs: str = ""
    """What a test must set up besides, so that the suite cannot run without one."""

    def load(self) -> type[Suite]:
        """The suite's class."""
        suite: type[Suite] = getattr(dovetail.testing, self.name)
        return suite


SUITES: Mapping[str, SuiteOf] = {
    "executor": SuiteOf("ExecutorSuite"),
    "attention_backend": SuiteOf("AttentionBackendSuite"),
    "scheduler": SuiteOf("SchedulerSuite"),
    "model_family": SuiteOf("ModelFamilySuite"),
    "quantization": SuiteOf("QuantizationSuite"),
    "operators": SuiteOf("OperatorsSuite"),
    "draft_worker": SuiteOf("DraftWorkerSuite"),
    "acceptance_rule": SuiteOf("AcceptanceRuleSuite"),
    "draft_length": SuiteOf("DraftLengthSuite"),
    "grammar": SuiteOf("GrammarSuite"),
    "dialect": SuiteOf("DialectSuite"),
    "logits_processor": SuiteOf("LogitsProcessorSuite"),
    "command": SuiteOf("CommandSuite"),
    "telemetry_sink": SuiteOf("TelemetrySinkSuite"),
    HOOKS_KIND: SuiteOf("HooksSuite"),
    "model_source": SuiteOf("ModelSourceSuite", "a model that the source finds"),
    "weight_format": SuiteOf("WeightFormatSuite", "a checkpoint in the format"),
    "route": SuiteOf("GeneratingRouteSuite", "the path and a body of a request"),
}
"""By kind."""


class Suite:
    """Base of every suite. A test is a subclass that names the plugin."""

    kind: ClassVar[str]
    """Of the plugins that the suite tests."""
    plugin: ClassVar[Any]
    """What is tested: a class, or the module or object of hooks."""
    quirks: ClassVar[Mapping[str, Quirk]] = {}
    """Tests that fail, by name, and why (`dovetail.testing.quirks`). Set it in the class's body."""
    node: pytest.Item
    """The test that runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises `PluginError` where `plugin` is of another kind or `quirks` names no test: one error, and no test
        runs."""
        super().__init_subclass__(**kwargs)
        reason = reason_against(cls, cls.plugin) if "plugin" in vars(cls) else None
        if reason := reason or reason_against_quirks(cls, cls.quirks):
            raise PluginError(reason)
        expect_failures(cls)

    @pytest.fixture(autouse=True)
    def _named(self, request: pytest.FixtureRequest) -> None:
        self.node = request.node
        if single := [name for name in self.quirks if "[" in name]:
            cases = {item.name for item in request.node.parent.collect()}
            unknown = [name for name in single if name not in cases]
            assert not unknown, f"there is a quirk of {unknown[0]}, and no such case"


class PluginSuite(Suite):
    """Base of the suites whose plugins are classes."""

    plugin: ClassVar[type[Plugin]]

    def test_declares_its_contract(self) -> None:
        """The host can tell which contract the class was written for."""
        check_contract(self.plugin, self.kind)

    def require(self, *names: str, **values: str | int) -> None:
        """Skips the test, by name, where the plugin does not declare one of these capabilities.

        Args:
            names: Fields of the record of capabilities that are bools.
            values: Of fields that are sets, a member; of fields that are numbers, the least.
        """
        asked = [*(Capability(name) for name in names), *(Capability(*each) for each in values.items())]
        for capability in asked:
            if not capability.is_declared_by(self.plugin):
                self.node.user_properties.append((UNDECLARED, (capability.name, capability.value)))
                pytest.skip(f"{self.plugin.__name__} does not declare {capability}")


def reason_against(suite: type[Suite], plugin: Any) -> str | None:
    """Why a suite cannot test this plugin, and which one can; None where it can."""
    module, _, base = KINDS[suite.kind].base.partition(":") if suite.kind in KINDS else ("", "", "")
    if base and isinstance(plugin, type) and _derives(plugin, module, base):
        return None
    of_kind = next((kind for kind, each in KINDS.items() if _derives(plugin, *each.base.split(":"))), None)
    if of_kind is None:
        if not base:
            return None  # hooks are any object
        found = plugin.__name__ if isinstance(plugin, type) else repr(plugin)
        return f"{suite.__name__} cannot test {found}: derive it from {base} of {module}, and name the class itself"
    return (
        f"{suite.__name__} cannot test {plugin.__name__}, which is a plugin of kind {of_kind}: "
        f"use dovetail.testing.{SUITES[of_kind].name}"
    )


def _derives(plugin: Any, module: str, base: str) -> bool:
    """Whether a class derives from that one, which is not imported for it."""
    bases = plugin.__mro__ if isinstance(plugin, type) else ()
    return any((each.__module__, each.__qualname__) == (module, base) for each in bases)
