"""What all conformance suites have in common: one attribute, `plugin`, names what is tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import pytest

import dovetail.testing
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Plugin
from dovetail.registry.entries import HOOKS_KIND
from dovetail.registry.loading import class_variables
from dovetail.testing._checks import check_contract
from dovetail.testing.capabilities import UNDECLARED, Capability
from dovetail.testing.quirks import Quirk, expect_failures, reason_against_quirks


@dataclass(frozen=True)
class SuiteOf:
    """The suite of a kind."""

    name: str
    """In `dovetail.testing`."""
    needs: str = ""
    """What the suite needs besides `plugin`, and how a test file and `dovetail plugins test` give it."""

    def load(self) -> type[Suite]:
        """The suite's class."""
        return _load_suite(self.name)


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
    "pooler": SuiteOf("PoolerSuite"),
    "kv_connector": SuiteOf("KVConnectorSuite"),
    "router": SuiteOf("RouterSuite"),
    "command": SuiteOf("CommandSuite"),
    "telemetry_sink": SuiteOf("TelemetrySinkSuite"),
    HOOKS_KIND: SuiteOf("HooksSuite"),
    "model_source": SuiteOf(
        "ModelSourceSuite",
        "a model that the source finds: write reference = ... (--set reference=NAME), with options = ... "
        "(--set 'options={...}') where the source needs them, or override the fixture `existing`",
    ),
    "weight_format": SuiteOf(
        "WeightFormatSuite",
        "a checkpoint in the format: write checkpoint = ... (--set checkpoint=PATH), with expected = ... "
        "(--set expected=FOLDER) for the same weights as safetensors; or save = ... (--set save=./file.py:function), "
        "which writes one; or override the fixture `saved`",
    ),
    "weight_transport": SuiteOf(
        "WeightTransportSuite",
        "what sends buckets to it: write create_sender = ... (--set create_sender=./file.py:MySender), a class that "
        "derives from dovetail.testing.WeightSender",
    ),
    "route": SuiteOf(
        "GeneratingRouteSuite",
        "path = ... (--set path=/v1/mine) and body_template = ... "
        "(--set 'body_template={prompt: $prompt, max_tokens: $num_tokens}'), or to override `body`; "
        "a route that generates no text has the RouteSuite (--suite RouteSuite)",
    ),
}
"""By kind."""

_OLD_NAMES = frozenset(
    {
        *("rule_class", "backend_class", "command_class", "dialect_class", "length_class", "worker_class"),
        *("executor_class", "format_class", "grammar_class", "hooks", "processor_class", "family_class"),
        *("operators_class", "method_class", "route_class", "scheduler_class", "source_class", "sink_class"),
    }
)
"""What `plugin` was called, in one suite or another."""


def _reason_against_names(suite: type[Suite]) -> str | None:
    """That a class's body gives the plugin by a name of old, which nothing reads."""
    for body in (base for base in suite.__mro__ if issubclass(base, Suite)):
        for name in sorted(_OLD_NAMES & vars(body).keys()):
            value = vars(body)[name]
            if isinstance(value, (type, ModuleType)) and reason_against(suite, value) is None:
                written = value.__name__
                return (
                    f"{body.__name__} sets `{name}`, and in every suite that is `plugin` now: write plugin = {written}"
                )
    return None


class Suite:
    """Base of every suite. A test is a subclass that names the plugin."""

    kind: ClassVar[str]
    """Of the plugins that the suite tests."""
    plugin: ClassVar[Any]
    """What is tested: a class, or the module or object of hooks."""
    quirks: ClassVar[Mapping[str, Quirk]] = {}
    """Tests that fail, by name, and why (`dovetail.testing.quirks`). Set it in the class's body."""
    function_attributes: ClassVar[frozenset[str]] = frozenset()
    """Names of attributes that are functions: `--set NAME=VALUE` takes references to them."""
    node: pytest.Item
    """The test that runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        expect_failures(cls)

    @classmethod
    def _reason_unfit(cls) -> str | None:
        """Why what is set cannot be: `plugin` is of another kind or goes by an old name, or `quirks` names no test."""
        reason = reason_against(cls, cls.plugin) if "plugin" in dir(cls) else None
        return reason or _reason_against_names(cls) or reason_against_quirks(cls, cls.quirks)

    @classmethod
    def reason_incomplete(cls) -> str | None:
        """Why no test can run, and what to write; None where all is set, and fits. It is asked when tests run: until
        then, a base may lack what a subclass or a fixture of the module sets. So an error of one class leaves the other
        classes of a file alone."""
        if reason := cls._reason_unfit():
            return reason
        for name in class_variables(cls):
            if name not in dir(cls):
                option = "" if name == "plugin" else f" (--set {name}=VALUE)"
                return f"{cls.__name__} has no `{name}`: write {name} = ... in the class{option}"
        return None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _complete(cls, request: pytest.FixtureRequest) -> None:
        """What no test can run without is one error: the first test fails, and the others are skipped."""
        if reason := cls.reason_incomplete():
            for item in request.session.items:
                if item.parent is request.node:
                    item.add_marker(pytest.mark.skip(reason=reason))
            pytest.fail(reason, pytrace=False)

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


def _load_suite(name: str) -> type[Suite]:
    """The suite of that name in `dovetail.testing`."""
    suite: type[Suite] = getattr(dovetail.testing, name)
    return suite


def suites_of(kind: str) -> dict[str, type[Suite]]:
    """All suites of a kind by name: the usual one, and those that ask for more or for less."""
    suites = {name: _load_suite(name) for name in dovetail.testing.__all__ if name.endswith("Suite")}
    return {name: suite for name, suite in suites.items() if suite.kind == kind}


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


def overrides(suite: type[Suite], base: type[Suite], name: str) -> bool:
    """Whether a subclass of `base` has an attribute of its own in place of the base's."""
    return any(name in vars(each) for each in suite.__mro__[: suite.__mro__.index(base)])


def _derives(plugin: Any, module: str, base: str) -> bool:
    """Whether a class derives from that one, which is not imported for it."""
    bases = plugin.__mro__ if isinstance(plugin, type) else ()
    return any((each.__module__, each.__qualname__) == (module, base) for each in bases)
