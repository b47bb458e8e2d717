"""Each folder of a bundled plugin is deleted: what is left imports, lists and serves, or says what it lacks.

The entry points stay, as they do where a file is lost: so the names are listed, and do not load. Folders that
generation can be without are deleted several at a time (`together`): what one alone would break, several break too.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.kinds import KINDS
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PROJECT["tool"]["dovetail"]["folders"]
GROUPS = {kind.group for kind in KINDS.values()}
REFERENCES = sorted(
    reference
    for group, points in PROJECT["project"]["entry-points"].items()
    if group in GROUPS
    for reference in points.values()
)


def source(package: str) -> Path:
    """Where a package of Dovetail, or a module, stands in the repository."""
    for name in sorted(FOLDERS, key=len, reverse=True):
        if package == name or package.startswith(f"{name}."):
            return ROOT.joinpath(FOLDERS[name], *package.removeprefix(name).strip(".").split("."))
    raise ValueError(package)


def plugin_packages() -> list[str]:
    """Each folder on the way to a bundled plugin, below `dovetail` itself, and each folder of plugins/."""
    found = {f"dovetail.plugins.{folder.name}" for folder in (ROOT / "plugins").iterdir() if folder.name[0] not in "_."}
    for reference in REFERENCES:
        parts = reference.partition(":")[0].split(".")
        found |= {".".join(parts[:count]) for count in range(2, len(parts) + 1)}
    return sorted(package for package in found if source(package).is_dir())


NEEDED = {
    "dovetail.attention_backends": "attention",
    "dovetail.executors": "executor",
    "dovetail.plugins": "model",
    "dovetail.plugins.model_families": "model.family",
    "dovetail.plugins.model_sources": "model",
    "dovetail.plugins.weight_formats": "weight_format",
    "dovetail.schedulers": "scheduler",
}
"""What no generation can be without -> what the error names."""

BUILT_ON = {
    "dovetail.attention_backends.flash": ("dovetail.attention_backends.flash_prefill",),
    "dovetail.attention_backends.paged_triton": (
        "dovetail.attention_backends.flash_prefill",
        "dovetail.attention_backends.triton_mla.backend",
    ),
    "dovetail.plugins.routes.chat": tuple(
        f"dovetail.plugins.routes.{name}" for name in ("explain", "responses", "tokenize")
    ),
    "dovetail.plugins.routes.completions": tuple(
        f"dovetail.plugins.routes.{name}" for name in ("chat", "explain", "responses")
    ),
    "dovetail.plugins.routes.messages": ("dovetail.plugins.routes.explain",),
    "dovetail.plugins.routes.responses": ("dovetail.plugins.routes.explain",),
    "dovetail.plugins.server": (
        "dovetail.plugins.commands.serve",
        *(
            f"dovetail.plugins.routes.{n}"
            for n in (
                "chat",
                "completions",
                "explain",
                "lora",
                "messages",
                "pooling",
                "responses",
                "tokenize",
                "weights",
            )
        ),
    ),
}
"""Modules beside a folder that share its code, and go with it."""

SIDE = 6
"""Folders that are deleted together, about."""


def together() -> list[tuple[str, ...]]:
    """None; each of `NEEDED` alone; and the rows and columns of a square of the others, for each depth: a folder never
    comes with one inside of it.

    What breaks without a folder that it should not need is seen where it is not deleted itself: so no two folders are
    together in both of their groups.
    """
    others = [package for package in plugin_packages() if package not in NEEDED]
    found: list[tuple[str, ...]] = [(), *((package,) for package in sorted(NEEDED))]
    for depth in sorted({package.count(".") for package in others}):
        layer = [package for package in others if package.count(".") == depth]
        rows = [tuple(layer[start : start + SIDE]) for start in range(0, len(layer), SIDE)]
        columns = [tuple(layer[start::SIDE]) for start in range(min(SIDE, len(layer)))]
        found += [*rows, *columns]
    return list(dict.fromkeys(found))


LIBRARIES = (
    *("fastapi", "gguf", "llguidance.hf", "opentelemetry.sdk.trace", "prometheus_client", "rich.console", "tokenizers"),
    *("torch", "transformers.models.llama.modeling_llama", "triton", "uvicorn", "xgrammar"),
)
"""What takes long to import and is nobody's plugin: one process does it, and each case begins as a fork of it."""

# The finder of an editable install would bring the missing folder back.
SCRIPT = """\
import contextlib, io, json, os, pathlib, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable" not in str(finder)]
sys.path.insert(0, tree)
os.chdir(tree)
os.environ |= {"TERM": "dumb", "COLUMNS": "200"}
assert not any(name.partition(".")[0] == "dovetail" for name in sys.modules)
import dovetail
assert pathlib.Path(dovetail.__file__).is_relative_to(tree)
from dovetail import LLM, SamplingParams
from dovetail.commands.main import main
from dovetail.contracts.errors import DovetailError, PluginError
from dovetail.contracts.kinds import KINDS
from dovetail.registry import Registry
found = {"broken": [], "names": []}
registry = Registry.scan()
for kind in KINDS:
    for entry in registry.entries(kind):
        found["names"].append(entry.name)
        try:
            registry.load_entry(entry)
        except PluginError:
            found["broken"].append(entry.reference)
printed, complained = io.StringIO(), io.StringIO()
sys.argv = ["dovetail", "plugins", "list"]
with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
    try:
        main()
    except SystemExit as ended:
        found["exit"] = ended.code
found["listed"], found["complaint"] = printed.getvalue(), complained.getvalue()
try:
    config = {"path": model, "tokenizer_mode": "none", "dtype": "float32"}
    with LLM(model=config, cache={"num_blocks": 50}, executor={"threads": 1}) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        found["tokens"] = list(output.outputs[0].token_ids)
except DovetailError as error:
    found["refusal"] = str(error)
pathlib.Path(answer).write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, as a wheel would lay it out."""
    target = tmp_path_factory.mktemp("tree")
    for package, folder in FOLDERS.items():
        ignored = shutil.ignore_patterns("__pycache__", "heads", "built-site")
        shutil.copytree(ROOT / folder, target.joinpath(*package.split(".")), ignore=ignored, dirs_exist_ok=True)
    return target


@contextmanager
def without(tree: Path, packages: Sequence[str]) -> Iterator[None]:
    """The folders are gone for the while."""
    folders = {tree.joinpath(*package.split(".")): tree / f"aside-{package}" for package in packages}
    for folder, aside in folders.items():
        folder.rename(aside)
    try:
        yield
    finally:
        for folder, aside in folders.items():
            aside.rename(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """(directory, the tokens that transformers generates for `PROMPT`)."""
    import torch

    directory = tmp_path_factory.mktemp("model")
    oracle = save_tiny_model(directory, tiny_config("llama"))
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        whole = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    return directory, whole[0, len(PROMPT) :].tolist()


PROMPT = [3, 5, 7, 11, 13]


@pytest.fixture(scope="module")
def warm() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LIBRARIES))
    return context


def run(warm: ForkServerContext, tree: Path, model: Path, answer: Path) -> dict[str, Any]:
    given = {"tree": str(tree), "model": str(model), "prompt": PROMPT, "answer": str(answer)}
    process = warm.Process(target=exec, args=(SCRIPT, given))
    process.start()
    process.join()
    assert process.exitcode == 0
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def test_any_two_folders_are_deleted_without_each_other() -> None:
    """So what one needs of another is not hidden by its own absence."""
    groups = together()
    for package in plugin_packages():
        own = [set(group) for group in groups if package in group]
        assert own
        assert set.intersection(*own) == {package}


@pytest.mark.nightly
@pytest.mark.parametrize("packages", together(), ids=lambda packages: " ".join(packages) or "none")
def test_what_is_left_imports_lists_and_serves(
    warm: ForkServerContext, tree: Path, model: tuple[Path, list[int]], tmp_path: Path, packages: tuple[str, ...]
) -> None:
    with without(tree, packages):
        found = run(warm, tree, model[0], tmp_path / "answer.json")
    lost = [each for package in packages for each in (package, *BUILT_ON.get(package, ()))]
    gone = [each for each in REFERENCES if each.startswith(tuple(f"{one}{end}" for one in lost for end in ".:"))]
    assert set(found["broken"]) == set(gone), "what does not load is what was deleted"
    assert {"fcfs", "llama", "cpu"} <= set(found["names"]), "metadata names what is not there as well"
    if "dovetail.plugins.commands.plugins:PluginsCommand" in gone:
        assert found["exit"]
        assert "plugins" in found["complaint"]
        assert "Traceback" not in found["complaint"]
    else:
        assert found["exit"] in (None, 0), found["complaint"]
        assert "fcfs" in found["listed"]
    if NEEDED.keys() & set(packages):
        (package,) = packages
        assert NEEDED[package] in found["refusal"]
    else:
        assert found.get("tokens") == model[1], found.get("refusal")
