"""What authors get wrong in a class: each prepared fault is found by its code, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.commands.installed import CODES, Diagnosis, diagnose
from dovetail.registry import Registry
from dovetail.testing.local_plugins import write_distribution

HEAD = """
from collections.abc import Sequence
from dovetail.contracts.attention import AttentionBackend, AttentionCapabilities
from dovetail.contracts.dialect import Dialect, DialectCapabilities
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import AcceptanceCapabilities, AcceptanceRule, DraftCapabilities, DraftWorker
from dovetail.contracts.telemetry import TelemetrySink


class Good(DraftWorker):
    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None)

    def propose(self, batch):
        return [None for _ in batch.requests]


class GoodBackend(AttentionBackend):
    contract = (1, 0)
    capabilities = AttentionCapabilities(device_types=None, dtypes=frozenset({"float32"}))

    def kv_cache_shape(self, num_blocks): return (num_blocks,)
    def plan(self, batch): ...
    def forward(self, layer, query, key, value, kv_cache): return query
"""

FAULTS: dict[str, tuple[str, str, str, str]] = {
    # Name: kind, body of the class, code, a part of message or remedy.
    "capabilites": (
        "draft_worker",
        "capabilites = DraftCapabilities(trees=True)",
        "misspelt-override",
        "`capabilities`",
    ),
    "on_verfied": (
        "draft_worker",
        "def on_verfied(self, seq_id, accepted, num_drafted): ...",
        "misspelt-override",
        "`on_verified`",
    ),
    "without_batch": ("draft_worker", "def propose(self): return []", "incompatible-override", "(self, batch)"),
    "one_more": (
        "draft_worker",
        "def on_finished(self, seq_id, token_ids, reason): ...",
        "incompatible-override",
        "'reason'",
    ),
    "swapped": (
        "draft_worker",
        "def on_finished(self, token_ids, seq_id): ...",
        "incompatible-override",
        "`token_ids` at place 1, where the host passes `seq_id`",
    ),
    "two_of_three_swapped": (
        "draft_worker",
        "def on_verified(self, accepted, seq_id, num_drafted): ...",
        "incompatible-override",
        "(self, seq_id",
    ),
    "one_between": (
        "draft_worker",
        "def on_finished(self, seq_id, reason=None, token_ids=()): ...",
        "incompatible-override",
        "`reason` at place 2",
    ),
    "renamed": ("draft_worker", "def propose(self, requests): return []", "renamed-parameter", "(batch)"),
    "instance_check": (
        "draft_worker",
        "def check(self, need, options, environment): return []",
        "incompatible-override",
        "no class method",
    ),
    "coroutine": ("draft_worker", "async def propose(self, batch): return []", "incompatible-override", "a coroutine"),
    "no_method": ("draft_worker", "on_finished = None", "incompatible-override", "the host calls it"),
    "trees": (
        "attention_backend",
        "capabilities = AttentionCapabilities(device_types=None, dtypes=frozenset({'float32'}), trees=True)",
        "false-capability",
        "MovesSlots",
    ),
    "moves": (
        "attention_backend",
        "def move_slots(self, kv_cache, source, target): ...",
        "ability-not-derived",
        "Derive Fault from MovesSlots",
    ),
    "text_dtypes": (
        "attention_backend",
        "capabilities = AttentionCapabilities(device_types=None, dtypes='float32')",
        "capability-type",
        "no frozenset",
    ),
    "two": (
        "draft_worker",
        "capabilities = DraftCapabilities(tensor_parallel='two')",
        "capability-type",
        "no int",
    ),
    "bool_for_int": (
        "draft_worker",
        "capabilities = DraftCapabilities(tensor_parallel=True)",
        "capability-type",
        "no int",
    ),
    "no_rank": (
        "draft_worker",
        "capabilities = DraftCapabilities(tensor_parallel=0)",
        "capability-value",
        "is 0: ranks",
    ),
    "size_of_nothing": (
        "attention_backend",
        "capabilities = AttentionCapabilities(\n"
        "        device_types=None, dtypes=frozenset({'float32'}), head_sizes=frozenset({64, -1}))",
        "capability-value",
        "with -1 in it",
    ),
    "unprintable": (
        "attention_backend",
        "capabilities = AttentionCapabilities(\n"
        "        device_types=None, dtypes=type('Odd', (), {'__repr__': lambda self: 1 / 0})())",
        "examination-failed",
        "ZeroDivisionError",
    ),
    "high": ("draft_worker", "preference = 'high'", "variable-type", "no int"),
    "from_the_future": ("draft_worker", "contract = (1, 99)", "other-contract", "version that the class was written"),
    "beta": ("draft_worker", "stability = 'beta'", "unknown-stability", "'experimental'"),
    "raises": (
        "draft_worker",
        "@classmethod\n    def check(cls, need, options, environment): return {}[need.dtype]",
        "check-raises",
        "KeyError",
    ),
    "sentence": (
        "draft_worker",
        "@classmethod\n    def check(cls, need, options, environment): return 'no water'",
        "check-returns",
        "'no water'",
    ),
    "generates": (
        "draft_worker",
        "@classmethod\n    def check(cls, need, options, environment):\n        yield 'no water'",
        "incompatible-override",
        "a generator",
    ),
    "as_dict": ("draft_worker", "capabilities = {'trees': True}", "capabilities-record", "DraftCapabilities(...)"),
    "other_options": ("draft_worker", "class Options: ...", "options-model", "PluginOptions"),
    "no_json": (
        "draft_worker",
        "class Options(PluginOptions):\n        model_config = {'arbitrary_types_allowed': True}\n"
        "        make: object = lambda: 3",
        "options-cannot-travel",
        "cannot be written as JSON",
    ),
    "no_contract": ("draft_worker", "contract = None", "contract-version", "contract = (1, "),
    "later": (
        "attention_backend",
        "capabilities = AttentionCapabilities(device_types=None, dtypes=frozenset({'float32'}), latents=True)",
        "newer-member",
        "Write `contract = (1, 1)`",
    ),
    "abstract": ("acceptance_rule", "contract = (1, 0)", "missing-method", "verify"),
    "of_another_kind": ("telemetry_sink", "", "not-of-kind", "TelemetrySink"),
}
BASES = {
    "attention_backend": "GoodBackend",
    "acceptance_rule": "AcceptanceRule",
    "telemetry_sink": "Good",
    "draft_worker": "Good",
}


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Of a distribution with one plugin per fault, and two without any."""
    site = tmp_path_factory.mktemp("faults")
    points: dict[str, dict[str, str]] = {
        "dovetail.draft_worker.v1": {"good": "faulty.good:Good"},
        "dovetail.attention_backend.v1": {"good": "faulty.good:GoodBackend"},
    }
    modules = {"faulty/__init__.py": "", "faulty/good.py": HEAD}
    for name, (kind, body, _, _) in FAULTS.items():
        modules[f"faulty/{name}.py"] = f"{HEAD}\n\nclass Fault({BASES[kind]}):\n    {body or 'pass'}\n"
        points.setdefault(f"dovetail.{kind}.v1", {})[name] = f"faulty.{name}:Fault"
    write_distribution(site, "faulty", entry_points=points, modules=modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        return diagnose(Registry.scan(), [f"faulty:{name}" for name in ("good", *FAULTS)])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_code_with_what_to_do(diagnosis, name):
    kind, _, code, text = FAULTS[name]
    found = [one for one in diagnosis.findings if one.subject == f"{kind} '{name}' (faulty 1.0)"]
    [finding] = [one for one in found if one.code == code]
    assert (finding.severity, bool(finding.remedy)) == (CODES[code].severity, True)
    assert text in f"{finding.message} {finding.remedy}"
    # What follows from the same fault may be told as well, and nothing else.
    assert {one.code for one in found} <= {code, "newer-member", "false-capability"}


def test_nothing_is_said_of_sound_classes_beside_them(diagnosis):
    sound = [entry for entry in diagnosis.entries if entry.name == "good"]
    assert [entry.kind for entry in sound] == ["attention_backend", "draft_worker"]
    assert [diagnosis.of(entry) for entry in sound] == [[], []]


def test_parameters_by_name_alone_may_stand_in_any_order(examine, tmp_path: Path):
    body = "    def on_finished(self, *args, token_ids=(), seq_id=None): ...\n"
    (tmp_path / "mine.py").write_text(f"{HEAD}\n\nclass Mine(Good):\n{body}")
    assert examine(f"{tmp_path}/mine.py:Mine").findings == ()


def test_a_reference_is_examined_and_gets_the_kind_of_its_class(examine, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        f"{HEAD}\n\nclass Mine(Good):\n    def on_finshed(self, seq_id, token_ids): ...\n"
    )
    diagnosis = examine(f"{tmp_path}/mine.py:Mine")
    [entry] = diagnosis.entries
    assert entry.kind == "draft_worker"
    [finding] = diagnosis.of(entry)
    assert finding.code == "misspelt-override"
    assert finding.message.startswith("draft_worker '")


def test_a_private_import_of_a_shared_file_is_told_once_and_of_each_plugin(examine, tmp_path: Path):
    source = f"{HEAD}\nfrom dovetail.engine.core import EngineCore\nclass First(Good): ...\nclass Second(Good): ...\n"
    (tmp_path / "mine.py").write_text(source)
    diagnosis = examine(f"{tmp_path}/mine.py:First", f"{tmp_path}/mine.py:Second")
    [finding] = diagnosis.findings
    assert (finding.code, " and 1 more: EngineCore from" in finding.message) == ("private-import", True)
    assert [entry.kind for entry in diagnosis.entries] == ["draft_worker", "draft_worker"]
    assert [diagnosis.of(entry) for entry in diagnosis.entries] == [[finding], [finding]]


def test_findings_are_of_their_own_plugin_whatever_the_order(examine, tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            f"{HEAD}\nclass Beta(Good):\n    stability = 'beta'\nclass Fine(Good): ...\n"
        )
    names = [f"{tmp_path}/{file}:{name}" for file, name in (("a.py", "Beta"), ("b.py", "Fine"), ("a.py", "Fine"))]
    diagnosis = examine(*names)
    found = {entry.name: [one.code for one in diagnosis.of(entry)] for entry in diagnosis.entries}
    assert found == dict(zip(names, (["unknown-stability"], [], []), strict=True))
    assert {entry.kind for entry in diagnosis.entries} == {"draft_worker"}
