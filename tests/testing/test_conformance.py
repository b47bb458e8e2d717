"""What a suite needs is given on the command line: models, checkpoints, functions and bodies of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dovetail.contracts.errors import PluginError
from dovetail.plugins.server.live import live_server
from dovetail.registry.registry import Registry
from dovetail.testing import _checkpoints as checkpoints
from dovetail.testing import conformance

FORMAT = """
import json
from pathlib import Path

import torch
from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import TensorInfo, WeightFormat, WeightReader


class Reader(WeightReader):
    "Tensors that torch pickled."

    factor = 1

    def __init__(self, path):
        self.path = path
        try:
            self.saved = torch.load(path)
            self.tensors_of = self.saved["tensors"]
        except Exception as error:
            raise ModelError(f"{path} is no checkpoint of torch") from error

    def infos(self):
        return [
            TensorInfo(name, tuple(t.shape), str(t.dtype)[6:], t.nbytes) for name, t in self.tensors_of.items()
        ]

    def read(self, name):
        if name not in self.tensors_of:
            raise ModelError(f"{self.path} has no tensor {name}")
        return self.tensors_of[name] * self.factor

    def files(self):
        return [self.path]


class Doubling(Reader):
    factor = 2


class Mine(WeightFormat):
    "Checkpoints that torch.save wrote."

    contract = (1, 0)
    reader = Reader

    @classmethod
    def recognizes(cls, files):
        return files.path.suffix == ".mine"

    def config(self, files):
        return {"generation_config": {}, **Reader(files.path).saved["config"]}

    def tokenizer(self, files):
        return None

    def open(self, files):
        return self.reader(files.path)


class Doubled(Mine):
    "Reads twice what was saved."

    reader = Doubling


def save(folder, config, tensors):
    path = folder / "model.mine"
    torch.save({"config": config, "tensors": tensors}, path)
    return path


number = 3
"""
SOURCE_OPTIONS = "{{cache_dir: {folder}, offline: true}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a format, and a model as safetensors."""
    (tmp_path / "mine.py").write_text(FORMAT)
    (tmp_path / "same").mkdir()
    checkpoints.save_safetensors(tmp_path / "same", checkpoints.CONFIG, checkpoints.random_tensors())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the outcome of each case."""
    report = Path("report.json").absolute()
    code = conformance.main([*arguments, "--no-hints", "--out", str(report)])
    return code, {each["name"]: each["outcome"] for each in json.loads(report.read_text())["results"]}


def sets(*given: str) -> list[str]:
    """As arguments."""
    return [part for each in given for part in ("--set", each)]


def write_checkpoint(folder: Path) -> Path:
    """What `save` of the test's format writes."""
    path = folder / "model.mine"
    torch.save({"config": dict(checkpoints.CONFIG), "tensors": checkpoints.random_tensors()}, path)
    return path


def test_a_source_is_tested_with_the_model_that_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = folder / "models--acme--llama" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    (folder / "models--acme--llama" / "refs").mkdir()
    (folder / "models--acme--llama" / "refs" / "v2").write_text("0" * 40)
    (folder / "models--acme--llama" / "refs" / "main").write_text("0" * 40)
    options = SOURCE_OPTIONS.format(folder=folder)
    given = ["reference=acme/llama", "revision=v2", "missing=acme/no-such-model", f"options={options}"]
    code, outcomes = run("hf", "--kind", "model_source", *sets(*given))
    assert (code, set(outcomes.values())) == (0, {"passed"}), capsys.readouterr().out


def test_a_source_of_paths_needs_nothing(folder: Path) -> None:
    code, outcomes = run("path", "--kind", "model_source")
    assert code == 0
    assert outcomes["test_finds_the_model"] == "passed"


def test_a_source_of_other_references_is_told_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["hf", "--kind", "model_source"]) == 2
    said = capsys.readouterr().err
    assert "needs a model that the source finds" in said
    assert "--set reference=NAME" in said


def test_a_sink_is_tested_with_its_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, outcomes = run("jsonl", "--kind", "telemetry_sink", *sets("options={path: steps.jsonl}"))
    assert (code, outcomes["test_takes_every_step[no KV blocks]"]) == (0, "passed"), capsys.readouterr().out
    assert (folder / "steps.jsonl").exists()


def test_a_format_is_tested_with_what_its_writer_writes(folder: Path) -> None:
    code, outcomes = run("./mine.py:Mine", *sets("save=./mine.py:save"))
    assert (code, outcomes["test_reads_every_tensor"]) == (0, "passed")
    code, outcomes = run("./mine.py:Doubled", *sets("save=./mine.py:save"))
    assert (code, outcomes["test_reads_every_tensor"]) == (1, "failed")
    assert json.loads(Path("report.json").read_text())["attributes"] == {"save": "./mine.py:save"}


def test_a_checkpoint_is_compared_with_safetensors(folder: Path) -> None:
    given = sets(f"checkpoint={write_checkpoint(folder).name}", "expected=same")
    code, outcomes = run("./mine.py:Mine", *given)
    assert (code, outcomes["test_reads_every_tensor"]) == (0, "passed")
    code, outcomes = run("./mine.py:Doubled", *given)
    assert (code, outcomes["test_reads_every_tensor"]) == (1, "failed")


def test_a_checkpoint_alone_says_that_its_values_were_compared_with_nothing(folder: Path) -> None:
    code, outcomes = run("./mine.py:Doubled", *sets(f"checkpoint={write_checkpoint(folder)}"))
    assert code == 0
    skipped = {"test_gives_the_config", "test_knows_every_tensor_before_it_reads", "test_reads_every_tensor"}
    assert {name for name in skipped if outcomes[name] == "skipped"} == skipped
    assert outcomes["test_reads_in_any_order"] == "passed"


def test_a_format_that_reads_safetensors_needs_nothing(folder: Path) -> None:
    code, outcomes = run("safetensors", "--kind", "weight_format")
    assert (code, outcomes["test_reads_every_tensor"]) == (0, "passed")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "needs a checkpoint in the format: write checkpoint = ... (--set checkpoint=PATH)"),
        (["checkpoint=gone"], "there is no "),
        (["checkpoint=mine.py", "expected=gone"], "is no folder with config.json and safetensors files"),
        (["save=save"], "names no function: write ./file.py:function or package.module:function"),
        (["save=./mine.py:number"], "3 cannot be called"),
        (["saved=mine.py"], "has no attribute 'saved'; it has: checkpoint, expected"),
    ],
)
def test_what_a_format_cannot_be_tested_with_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    assert conformance.main(["./mine.py:Mine", *sets(*given)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert not said.out


def test_a_route_is_served_by_what_the_command_says_and_told_what_a_body_is() -> None:
    registry = Registry.scan()
    route, serve = registry.find("route", "completions"), "dovetail.plugins.server.live:live_server"
    with pytest.raises(PluginError, match=r"path=/v1/mine.*body_template=.*--suite RouteSuite"):
        conformance.load_tested(registry, route, {"path": "/v1/completions"}, defaults={"serve": serve})
    body = {"prompt": "$prompt", "options": [{"n": "$num_tokens"}], "stop": None}
    tested = conformance.load_tested(
        registry,
        route,
        {"path": "/v1/completions", "body_template": body, "end_of_stream": "data: done"},
        defaults={"serve": serve},
    )
    suite = type("TestCompletions", (tested.suite,), tested.attributes)
    assert suite.serve is live_server
    assert suite.end_of_stream == b"data: done"
    assert suite().body("Once", 3) == {"prompt": "Once", "options": [{"n": 3}], "stop": None}


def test_another_suite_of_the_kind_is_chosen_by_name() -> None:
    registry = Registry.scan()
    route, scheduler = registry.find("route", "health"), registry.find("scheduler", "fcfs")
    defaults = {"serve": "dovetail.plugins.server.live:live_server"}
    tested = conformance.load_tested(registry, route, {}, suite_name="RouteSuite", defaults=defaults)
    assert tested.suite.__name__ == "RouteSuite"
    assert conformance.load_tested(registry, scheduler, {}, defaults=defaults).given == {}
    with pytest.raises(PluginError, match=r"no suite RouteSuite of kind scheduler; suites: SchedulerSuite$"):
        conformance.load_tested(registry, scheduler, {}, suite_name="RouteSuite")
