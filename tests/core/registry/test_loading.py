"""Importing a chosen plugin, and refusing one that is not what it claims to be."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.registry import Registry, create_class

SCHEDULER = "from dovetail.contracts.scheduler import Scheduler\n"


@pytest.fixture
def local(tmp_path):
    """Loads `Mine` from a module of the given source, as a local file."""

    def load(source: str, kind: str = "telemetry_sink") -> Any:
        (tmp_path / "mine.py").write_text(source)
        return Registry.scan().load(kind, "mine.py:Mine", tmp_path)

    return load


def test_an_import_error_carries_the_plugins_traceback_and_spares_the_others(install, sink_source):
    registry = install(
        "acme",
        entry_points={"dovetail.telemetry_sink.v1": {"broken": "broken_sink:Sink", "good": "good_sink:Sink"}},
        modules={
            "broken_sink.py": "def boom():\n    raise RuntimeError('no luck')\nboom()\n",
            "good_sink.py": sink_source,
        },
    )
    with pytest.raises(PluginError) as caught:
        registry.load("telemetry_sink", "broken")
    first, _, traceback = str(caught.value).partition("\n")
    assert first == "telemetry_sink 'broken' (acme 1.0) cannot be imported: RuntimeError: no luck"
    assert "line 2, in boom" in traceback
    assert registry.load("telemetry_sink", "good").__name__ == "Sink"


def test_a_plugin_that_exits_on_import_does_not_take_the_host_along(local):
    with pytest.raises(PluginError, match="SystemExit: 3"):
        local("raise SystemExit(3)")


def test_a_missing_dependency_names_the_extra_that_brings_it(install):
    registry = install(
        "acme",
        entry_points={"dovetail.scheduler.v1": {"far": "acme_far:Far"}},
        modules={"acme_far.py": "import quantum_annealer.core"},
        requires=('quantum-annealer>=2; extra == "far"',),
    )
    with pytest.raises(PluginError, match=r'needs the module .quantum_annealer.*: pip install "acme\[far\]"'):
        registry.load("scheduler", "far")


def test_a_class_of_another_kind_is_refused(local):
    source = SCHEDULER + "class Mine(Scheduler):\n    contract = (1, 0)\n"
    with pytest.raises(PluginError, match=r"no subclass of dovetail\.contracts\.telemetry\.TelemetrySink"):
        local(source)


def test_a_class_without_contract_is_told_what_to_write(local):
    source = "from dovetail.contracts.telemetry import TelemetrySink\nclass Mine(TelemetrySink): pass\n"
    with pytest.raises(PluginError, match=r"add `contract = \(1, \d\)`"):
        local(source)


@pytest.mark.parametrize(
    ("contract", "advice"),
    [("(2, 0)", "upgrade dovetail"), ("(1, 7)", "upgrade dovetail"), ("(0, 3)", "upgrade the plugin")],
)
def test_a_class_written_for_another_contract_is_refused(local, contract, advice):
    source = (
        f"from dovetail.contracts.telemetry import TelemetrySink\nclass Mine(TelemetrySink): contract = {contract}\n"
    )
    with pytest.raises(PluginError, match=advice) as caught:
        local(source)
    spoken = contract[1:-1].replace(", ", ".")
    assert f"speaks telemetry_sink contract {spoken}, this Dovetail speaks {KINDS['telemetry_sink'].version}" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_abstract_methods_that_are_missing_are_named(local):
    source = SCHEDULER + "class Mine(Scheduler):\n    contract = (1, 0)\n    def add(self, request): ...\n"
    with pytest.raises(PluginError, match="does not implement num_running, num_waiting, remove, schedule"):
        local(source, "scheduler")


def test_capabilities_of_another_kind_are_refused(local):
    source = (
        "from dovetail.contracts.speculation import AcceptanceRule, DraftCapabilities\n"
        "class Mine(AcceptanceRule):\n    contract = (1, 0)\n    capabilities = DraftCapabilities()\n"
        "    def verify(self, requests): return []\n"
    )
    with pytest.raises(PluginError, match=r"write `capabilities = AcceptanceCapabilities\(\.\.\.\)`"):
        local(source, "acceptance_rule")


def test_a_stability_of_ones_own_is_refused(local, sink_source):
    with pytest.raises(PluginError, match="stability is 'beta': write one of 'experimental', 'provisional', 'stable'"):
        local(
            sink_source.replace("class Sink(", "class Mine(").replace(
                "contract =", 'stability = "beta"\n    contract ='
            )
        )


def test_a_missing_class_is_named(tmp_path, sink_source):
    (tmp_path / "mine.py").write_text(sink_source)
    with pytest.raises(PluginError, match=r"mine.py has no 'Zink'"):
        Registry.scan().load("telemetry_sink", "mine.py:Zink", tmp_path)


def test_a_component_travels_and_gives_the_same_class_and_options(tmp_path, sink_source):
    (tmp_path / "mine.py").write_text(sink_source)
    component = Registry.scan().component("telemetry_sink", "./mine.py:Sink", {"every": 5}, tmp_path)
    assert component.options == {"path": "out.txt", "every": 5}
    plugin, options = create_class(pickle.loads(pickle.dumps(component)))
    assert plugin is Registry.scan().load("telemetry_sink", "./mine.py:Sink", tmp_path)
    assert options == plugin.Options(every=5)
    assert isinstance(pickle.loads(pickle.dumps(plugin(options))), plugin)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evry": 2}, "unknown option 'evry'; did you mean 'every'? (options: path, every)"),
        ({"every": "often"}, "option 'every': Input should be a valid integer"),
    ],
)
def test_bad_options_name_the_plugin_and_the_key(tmp_path, sink_source, options, message):
    (tmp_path / "mine.py").write_text(sink_source)
    with pytest.raises(ConfigError) as caught:
        Registry.scan().component("telemetry_sink", "./mine.py:Sink", options, tmp_path)
    assert message in str(caught.value)
    assert "telemetry_sink './mine.py:Sink'" in str(caught.value)


def test_a_required_option_is_asked_for(tmp_path, sink_source):
    (tmp_path / "mine.py").write_text(sink_source.replace('path: str = "out.txt"', "path: str"))
    with pytest.raises(ConfigError, match="option 'path' is required"):
        Registry.scan().component("telemetry_sink", "./mine.py:Sink", {}, tmp_path)


def test_a_required_option_says_what_it_is(tmp_path, sink_source):
    documented = 'path: str\n    """Where the\n    lines go."""'
    (tmp_path / "mine.py").write_text(sink_source.replace('path: str = "out.txt"', documented))
    with pytest.raises(ConfigError, match=r"option 'path' is required: Where the lines go\."):
        Registry.scan().component("telemetry_sink", "./mine.py:Sink", {}, tmp_path)


def test_options_that_raise_are_the_plugins_fault(tmp_path, sink_source):
    validator = "    @field_validator('every')\n    def check(cls, value): return {}[value]\n"
    source = sink_source.replace("every: int = 1\n", "every: int = 1\n" + validator)
    (tmp_path / "mine.py").write_text("from pydantic import field_validator\n" + source)
    with pytest.raises(PluginError, match="its Options cannot be validated: KeyError: 7"):
        Registry.scan().component("telemetry_sink", "./mine.py:Sink", {"every": 7}, tmp_path)


def test_options_that_cannot_travel_are_refused(tmp_path, sink_source):
    source = "from pydantic import SecretStr\n" + sink_source.replace("path: str", "path: SecretStr")
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(PluginError, match="cannot travel"):
        Registry.scan().component("telemetry_sink", "./mine.py:Sink", {"path": "hidden"}, tmp_path)


def test_options_without_json_are_refused_by_the_plugins_name(tmp_path, sink_source):
    source = sink_source.replace('path: str = "out.txt"', "path: object = lambda: 3")
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(
        PluginError, match=r"telemetry_sink './mine.py:Sink' .*cannot be written as JSON.*use plain types"
    ):
        Registry.scan().component("telemetry_sink", "./mine.py:Sink", {}, tmp_path)


def test_capabilities_as_a_dict_are_refused_by_the_plugins_name(local):
    source = SCHEDULER + "class Mine(Scheduler):\n    contract = (1, 0)\n    capabilities = {'trees': True}\n"
    body = "".join(f"    def {name}(self, *a): ...\n" for name in ("add", "remove", "schedule"))
    body += "".join(f"    {name} = 0\n" for name in ("num_running", "num_waiting"))
    with pytest.raises(
        PluginError, match=r"scheduler 'mine.py:Mine' .*capabilities is \{'trees': True\}: write `capab"
    ):
        local(source + body, "scheduler")
