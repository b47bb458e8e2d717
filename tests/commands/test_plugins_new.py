"""`dovetail plugins new`: every kind's distribution works before its first edit."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from setuptools.config.pyprojecttoml import read_configuration
from typer.testing import CliRunner

from dovetail.commands.installed import HOOKS_KIND
from dovetail.contracts.errors import DovetailError
from dovetail.contracts.kinds import KINDS, TEMPLATES_GROUP
from dovetail.plugins.commands.plugins import PluginsCommand
from dovetail.testing.chat_models import FAMILIES, save_chat_model
from dovetail.testing.local_plugins import write_distribution

if TYPE_CHECKING:
    from .conftest import Terminal

ALL_KINDS = [*KINDS, HOOKS_KIND]
SLOW_KINDS = {"executor", "model_family", "grammar", "dialect", "route"}
FAST_KINDS = [kind for kind in ALL_KINDS if kind not in SLOW_KINDS]
STARTS = sorted(point.name for point in entry_points(group=TEMPLATES_GROUP))
SLOW_PROJECTS = [*sorted(SLOW_KINDS), *STARTS]


def new(*arguments: str) -> Any:
    """What `dovetail plugins new ARGUMENTS` does here, as click's `Result`; there is no terminal."""
    return CliRunner().invoke(PluginsCommand().app(), ["new", *arguments])


def refusal(*arguments: str) -> str:
    """The message of an error that is no accident."""
    result = new(*arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, DovetailError), result.output
    return str(result.exception)


def make(folder: Path, kind: str, start: str | None = None) -> Path:
    """The distribution acme-KIND in `folder`."""
    place = folder / f"{kind}-{start or 'plain'}"
    name = f"acme-{kind.replace('_', '-')}" + (f"-{start}" if start else "")
    options = ["--kind", kind, "--folder", str(place), *(["--from", start] if start else [])]
    result = new(name, *options, "--author", "Ada Lovelace <ada@example.org>")
    assert result.exit_code == 0, result.output
    return place


def run_tests(*folders: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the distributions' own tests in a process that finds their packages."""
    sources = os.pathsep.join(str(folder / "src") for folder in folders)
    tests = [str(folder / "tests") for folder in folders]
    root = ["-c", "/dev/null", "--rootdir", str(folders[0].parent), "-p", "no:cacheprovider"]
    options = [*root, "--import-mode=importlib", "--junitxml", str(cwd / "report.xml")]
    command = [sys.executable, "-m", "pytest", "-q", *options, *tests]
    environment = os.environ | {"PYTHONPATH": sources}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A distribution for each kind, and for each start (KIND.NAME)."""
    root = tmp_path_factory.mktemp("projects")
    made = {kind: make(root, kind) for kind in ALL_KINDS}
    return made | {point: make(root, *point.split(".")) for point in STARTS}


Outcomes = dict[str, list[ET.Element]]


def run_together(projects: dict[str, Path], names: list[str], cwd: Path) -> Outcomes:
    """Test cases of projects, by project; all run in one process, which is what takes longest to start."""
    done = run_tests(*(projects[name] for name in names), cwd=cwd)
    cases = list(ET.parse(cwd / "report.xml").iter("testcase"))
    assert cases, done.stdout + done.stderr
    return {
        name: [case for case in cases if f"{projects[name].name}.tests." in case.get("classname", "")] for name in names
    }


def check_own_tests(cases: list[ET.Element]) -> None:
    assert not {case.get("name"): case[0].get("message") for case in cases if _is_bad(case)}
    assert len([case for case in cases if len(case) == 0]) >= 5


@pytest.fixture(scope="module")
def outcomes(projects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_together(projects, FAST_KINDS, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("kind", FAST_KINDS)
def test_its_own_tests_pass_before_the_first_edit(outcomes: Outcomes, kind: str) -> None:
    check_own_tests(outcomes[kind])


def _is_bad(case: ET.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


@pytest.fixture(scope="module")
def slow_outcomes(projects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_together(projects, SLOW_PROJECTS, tmp_path_factory.mktemp("slow"))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("project", SLOW_PROJECTS)
def test_tests_of_slow_kinds_and_of_each_start_pass_too(slow_outcomes: Outcomes, project: str) -> None:
    check_own_tests(slow_outcomes[project])


def test_ruff_finds_nothing(projects: dict[str, Path]) -> None:
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", *map(str, projects.values())],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["a", "x" * 40, "acme.draft_worker-2"])
def test_ruff_finds_nothing_whatever_the_name(tmp_path: Path, name: str) -> None:
    for kind in ALL_KINDS:
        assert new(name, "--kind", kind, "--folder", str(tmp_path / kind)).exit_code == 0
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", str(tmp_path)]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_metadata_names_the_plugin(projects: dict[str, Path]) -> None:
    for kind in ALL_KINDS:
        project = tomllib.loads((projects[kind] / "pyproject.toml").read_text())["project"]
        name = f"acme-{kind.replace('_', '-')}"
        ((group, points),) = project["entry-points"].items()
        assert project["name"] == name
        assert project["authors"] == [{"name": "Ada Lovelace", "email": "ada@example.org"}]
        assert group == f"dovetail.{kind}.v1"
        assert list(points) == [name.replace("-", "_")]
        assert any(requirement.startswith("dovetail>=") for requirement in project["dependencies"])


def test_a_distribution_has_what_it_needs(projects: dict[str, Path]) -> None:
    folder = projects["draft_worker"]
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files = {file for file in files if "__pycache__" not in file}
    package = "src/acme_draft_worker"
    assert files == {
        ".github/workflows/test.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "engine.yaml",
        "pyproject.toml",
        f"{package}/__init__.py",
        f"{package}/plugin.py",
        "tests/test_plugin.py",
    }
    workflow = (folder / ".github/workflows/test.yml").read_text()
    assert "${{ matrix.python }}" in workflow
    assert not re.search(r"\{\{ \w+ \}\}", workflow.replace("{{ matrix.python }}", "").replace("$", ""))


class TestRefusals:
    """What cannot be made is one message, and leaves nothing behind."""

    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        yield
        assert list(tmp_path.glob("**/pyproject.toml")) == []

    @pytest.mark.parametrize(
        "name",
        ["1-acme", "my drafter", "-acme", "acme-", "acme/drafter", "../acme", "class", "моделі", "", "x" * 41],
    )
    def test_names_that_cannot_be_used(self, name: str) -> None:
        assert f"'{name}' cannot be the name" in refusal("--kind", "scheduler", "--", name)

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("json", "Python finds a package 'json'"),
            ("dovetail", "Python finds a package"),
            ("auto", "means something else in a config"),
            ("null", "means something else in a config"),
        ],
    )
    def test_names_that_mean_something_else(self, name: str, why: str) -> None:
        assert why in refusal(name, "--kind", "scheduler")

    def test_a_name_that_another_plugin_has(self) -> None:
        assert "there is a scheduler 'fcfs' already, of dovetail" in refusal("fcfs", "--kind", "scheduler")

    def test_an_unknown_kind(self) -> None:
        assert "Did you mean scheduler?" in refusal("acme", "--kind", "schedular")
        assert ", ".join(ALL_KINDS) in refusal("acme", "--kind", "schedular")

    def test_a_start_of_another_kind(self) -> None:
        message = refusal("acme", "--kind", "scheduler", "--from", "ngram")
        assert message == (
            "--from ngram: 'ngram' is a draft_worker, not a scheduler; a scheduler can start from fcfs, priority"
        )

    def test_a_start_that_nothing_offers(self) -> None:
        assert "a scheduler can start from fcfs, priority" in refusal("acme", "--kind", "scheduler", "--from", "lifo")
        assert "has no such start: leave --from out" in refusal("acme", "--kind", "route", "--from", "chat")

    def test_what_is_missing_is_named(self) -> None:
        assert "--kind, one of executor" in refusal("acme")
        assert "dovetail plugins new NAME" in refusal("--kind", "scheduler")

    @pytest.mark.parametrize(
        ("author", "why"),
        [
            ("Ada <ada>", "no address that mail can go to ('ada')"),
            ("Ada <ada@b..org>", "no address that mail can go to"),
            ("Ada <ada b@example.org>", "no address that mail can go to"),
            ("Ada <>", "no address between < and >"),
            ("Ada ada@example.org", "no address that mail can go to"),
            ("Ada <ada@example.org", "no address between < and >"),
            ("Ada <a@example.org>, Bob <b@example.org>", "no address between < and >"),
            ("Lovelace, Ada <ada@example.org>", "comma"),
            ("Ada\nclassifiers = []", "line breaks"),
            ("Ada <ada@example.org\n>\udcff", "line breaks"),
        ],
    )
    def test_authors_that_cannot_be_used(self, author: str, why: str) -> None:
        message = refusal("acme", "--kind", "scheduler", "--author", author)
        assert why in message
        assert message.endswith('write "Name <address>", like "Ada Lovelace <ada@example.org>"')

    def test_a_folder_that_exists(self, tmp_path: Path) -> None:
        (tmp_path / "acme").mkdir()
        assert "acme exists, and is left as it is" in refusal("acme", "--kind", "scheduler")
        (tmp_path / "file").touch()
        assert "exists" in refusal("acme", "--kind", "scheduler", "--folder", "file")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        assert "exists" in refusal("acme", "--kind", "scheduler", "--folder", "link")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["acme", "file", "link"]

    def test_the_folder_of_a_plugin_that_is_installed_in_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "acme-skip" / "src" / "acme_skip"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(package.parent)
        arguments = ("acme-skip", "--kind", "scheduler")
        assert "acme-skip exists, and is left as it is" in refusal(*arguments)
        elsewhere = refusal(*arguments, "--folder", "elsewhere")
        assert f"Python finds a package 'acme_skip' already in {package}, which it would hide" in elsewhere

    def test_a_folder_in_none(self) -> None:
        assert "there is no folder nowhere" in refusal("acme", "--kind", "scheduler", "--folder", "nowhere/acme")

    def test_a_full_disk_leaves_nothing_behind(self, tmp_path: Path) -> None:
        """A limit on the size of files stands for the disk: the system refuses to write the larger of them."""
        code = (
            "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
            "from dovetail.commands.main import main;"
            "sys.argv = ['dovetail', 'plugins', 'new', 'acme', '--kind', 'scheduler']; main()"
        )
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert "acme cannot be written" in done.stderr, done.stderr
        assert list(tmp_path.iterdir()) == []


def test_where_there_are_public_bases_it_says_how_to_start_from_one(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        name = f"{tmp_path}/{len(list(tmp_path.iterdir()))}"
        return new("acme-own", *arguments, "--folder", name).output

    assert "To start from the public base of another plugin: --from fcfs or --from priority" in said(
        "--kind", "scheduler"
    )
    assert "public base" not in said("--kind", "scheduler", "--from", "fcfs")
    assert "public base" not in said("--kind", "route")


@pytest.mark.parametrize(
    ("author", "written"),
    [
        ("", None),
        ("  Ada  ", {"name": "Ada"}),
        ('Ada "Countess" Lovelace \\', {"name": 'Ada "Countess" Lovelace \\'}),
        ('"Ada O\'Hara" <a.b+c@mail.example.org>', {"name": "Ada O'Hara", "email": "a.b+c@mail.example.org"}),
        ("Łukasz {{ kind }} <l@exämple.org>", {"name": "Łukasz {{ kind }}", "email": "l@exämple.org"}),
        ("ada@example.org", {"email": "ada@example.org"}),
        ("<ada@example.org>", {"email": "ada@example.org"}),
    ],
)
def test_authors_are_written_so_that_a_build_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, author: str, written: dict[str, str] | None
) -> None:
    folder = tmp_path / "acme"
    result = new("acme", "--kind", "hooks", "--folder", str(folder), "--author", author)
    assert result.exit_code == 0, result.output
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project.get("authors", []) == ([written] if written else [])
    monkeypatch.chdir(folder)
    built = read_configuration(folder / "pyproject.toml")  # what setuptools validates before it builds
    assert built["project"].get("authors", []) == project.get("authors", [])


def test_a_class_is_not_called_like_what_it_uses(tmp_path: Path) -> None:
    assert new("draft-worker", "--kind", "draft_worker", "--folder", str(tmp_path / "acme")).exit_code == 0
    assert "class DraftWorkerPlugin(DraftWorker):" in (tmp_path / "acme/src/draft_worker/plugin.py").read_text()


def test_the_kind_follows_from_a_start_that_only_one_has(tmp_path: Path) -> None:
    result = new("acme", "--from", "fcfs", "--folder", str(tmp_path / "acme"))
    assert result.exit_code == 0, result.output
    assert "BatchingScheduler" in (tmp_path / "acme/src/acme/plugin.py").read_text()


@pytest.fixture
def outsider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a third party's distribution with a template."""

    def install(distribution: str, source: str) -> None:
        package = distribution.replace("-", "_")
        folder = f"{package}/starts/polite"
        files = {f"{package}/__init__.py": "", f"{folder}/template.toml": 'summary = "Is polite"\n'}
        files[f"{folder}/plugin.py.jinja"] = source
        points = {"dovetail.templates": {"scheduler.polite": f"{package}.starts.polite"}}
        site = tmp_path / distribution
        write_distribution(site, distribution, entry_points=points, modules=files)
        monkeypatch.syspath_prepend(site)
        importlib.invalidate_caches()

    return install


def test_third_parties_offer_starts_too(outsider: Callable[..., None], tmp_path: Path) -> None:
    outsider("polite-things", "class {{ class_name }}: ...\n")
    result = new("acme", "--kind", "scheduler", "--from", "polite", "--folder", str(tmp_path / "acme"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "acme/src/acme/plugin.py").read_text() == "class Acme: ...\n"
    assert "SchedulerSuite" in (tmp_path / "acme/tests/test_plugin.py").read_text()


def test_two_starts_with_one_name_are_an_error_that_names_both(outsider: Callable[..., None]) -> None:
    outsider("first-things", "")
    outsider("other-things", "")
    assert "first-things and other-things" in refusal("acme", "--kind", "scheduler", "--from", "polite")


def test_a_template_with_a_mistake_is_named(outsider: Callable[..., None], tmp_path: Path) -> None:
    outsider("mistaken-things", "{{ no_such_value }}")
    message = refusal("acme", "--kind", "scheduler", "--from", "polite", "--folder", str(tmp_path / "acme"))
    assert "plugin.py" in message
    assert "no_such_value" in message
    assert not (tmp_path / "acme").exists()


def test_it_asks_at_a_terminal(plain_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = plain_terminal("plugins", "new")
    shown.wait_for("which requests run next")  # the table of kinds
    shown.wait_for("kind: ")
    shown.type("scheduling\r")
    shown.wait_for("there is no plugin kind")
    shown.type("scheduler\r")
    shown.wait_for(r"start from the public base of \(fcfs, priority\) \S*\(none\)")
    shown.type("lifo\r")
    shown.wait_for("a scheduler can start from fcfs, priority")
    shown.type("priority\r")
    shown.wait_for("name of the distribution: ")
    shown.type("no name\r")
    shown.wait_for("cannot be the name")
    shown.type("acme-order\r")
    shown.wait_for("author")
    shown.type("Ada <ada>\r")
    shown.wait_for("no address that mail can go to")
    shown.type("Ada\r")
    shown.wait_for(r"folder to make \S*\(acme-order\)")
    shown.type(f"{tmp_path}/made\r")
    shown.wait_for("Its tests pass as it is")
    assert shown.end() == 0
    assert 'name = "acme-order"' in (tmp_path / "made/pyproject.toml").read_text()
    assert "Ada" in (tmp_path / "made/LICENSE").read_text()
    assert "over the base of priority" in (tmp_path / "made/src/acme_order/plugin.py").read_text()


def test_enter_takes_what_is_offered(plain_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = plain_terminal("plugins", "new", "acme", "--author", "", "--folder", str(tmp_path / "made"))
    shown.wait_for("kind: ")
    shown.type("scheduler\r")
    shown.wait_for("start from")
    shown.type("\r")
    shown.wait_for("Its tests pass as it is")
    assert shown.end() == 0
    assert "(Scheduler):" in (tmp_path / "made/src/acme/plugin.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["acme", "--author", "Ada <ada>"], "no address that mail can go to"),
        (["no name"], "cannot be the name"),
        (["--kind", "scheduler", "--from", "lifo"], "a scheduler can start from fcfs"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_before_anything_is_asked(
    plain_terminal: Callable[..., Terminal], arguments: list[str], why: str
) -> None:
    shown = plain_terminal("plugins", "new", *arguments)
    shown.wait_for(why)
    assert shown.end() != 0


def test_nothing_is_asked_where_nothing_is_missing(plain_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shown = plain_terminal("plugins", "new", "acme", "--kind", "hooks", "--folder", str(tmp_path / "made"))
    shown.wait_for("Its tests pass as it is")
    assert shown.end() == 0


# One process runs all commands: its start takes longer than each of them.
COMMANDS = """\
import contextlib, io, json, sys
from dovetail.commands.main import main
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv = ["dovetail", *arguments]
    printed, code = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    results[name] = [code, printed.getvalue()]
print(json.dumps(results))
"""


@pytest.mark.nightly
def test_wheels_are_found_loaded_and_chosen_by_their_configs(projects: dict[str, Path], tmp_path: Path) -> None:
    """All kinds as wheels of one environment: the doctor finds nothing, and each engine.yaml is resolved."""
    save_chat_model(tmp_path / "model", FAMILIES["hermes"])  # with an end of sequence, for grammars
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    folders = [str(projects[kind]) for kind in ALL_KINDS]
    subprocess.run([*command, *folders], check=True, capture_output=True)

    commands = {"list": ["plugins", "list"], "doctor": ["plugins", "doctor"]}
    for kind in ALL_KINDS:
        if (config := projects[kind] / "engine.yaml").is_file():
            commands[kind] = ["explain", str(config), "-o", f"model.path={tmp_path / 'model'}", "-o", "device=cpu"]
    environment = os.environ | {"PYTHONPATH": str(site), "TERM": "dumb"}
    script = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)
    for name, (code, printed) in results.items():
        assert code in (None, 0), (name, printed)
        if name in ALL_KINDS:
            assert f"acme_{name}" in printed
    assert [kind for kind in ALL_KINDS if f"acme_{kind}" not in results["list"][1]] == []
