"""The pages of the site that no one writes: contracts, dovetail.nn, and listings of source files."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path, PurePosixPath

from site_tree import (
    LANGUAGES,
    NN_FILES,
    ROOT,
    contract_modules,
    example_files,
    first_sentence,
    kinds_of,
    listings,
    module_docstring,
    nn_page,
    place,
)

from dovetail.contracts.kinds import HOOKS_GROUP, HOOKS_VERSION, KINDS

GUIDES = {
    "attention_backend": "writing/attention.md",
    "acceptance_rule": "writing/drafters.md#what-an-acceptance-rule-reads",
    "dialect": "dialects.md#building-one",
    "draft_length": "writing/drafters.md#draft-lengths",
    "draft_worker": "writing/drafters.md",
    "executor": "executors.md",
    "grammar": "grammars.md#writing-one",
    "model_family": "writing/models.md",
    "quantization": "writing/quantization.md",
    "route": "routes.md#writing-one",
    "kv_connector": "kv-connectors.md#writing-one",
    "router": "routing.md#writing-one",
    "scheduler": "writing/schedulers.md",
    "weight_transport": "rl.md#a-transport-of-your-own",
    "telemetry_sink": "telemetry.md#a-sink-of-your-own",
}
"""Pages that say how to write one, by kind."""

UNLISTED = """\
---
search: {exclude: true}
hide: [toc]
---
"""
"""Begins a page that links alone lead to."""


def generated_pages() -> dict[str, str]:
    """Markdown of all generated pages by their path on the site."""
    made = {"contracts/index.md": _contracts_index(), "nn/index.md": _nn_index()}
    for module in contract_modules():
        made[f"contracts/{module}.md"] = _contract_page(module)
    for module in NN_FILES.values():
        if module != "dovetail.nn":
            made[nn_page(module)] = f"# {module}\n\n::: {module}\n"
    for path in listings():
        made[place(path)] = _folder_page(path) if (ROOT / path).is_dir() else _file_page(path)
    return made


def files_of_example(readme: str) -> str:
    """What the page of an example has after its README: its files, linked as in the repository."""
    folder = PurePosixPath(readme).parent
    lines = ["", "## Files", "", "| file | what it has |", "| --- | --- |"]
    for path in example_files(folder.as_posix()):
        name = PurePosixPath(path).relative_to(folder)
        lines.append(f"| [{name}]({name}) | {_said(ROOT / path)} |")
    return "\n".join([*lines, ""])


def title(module: str) -> str:
    """What a module of the contracts is called: its kinds, or its name."""
    names = [name.replace("_", " ") for name in kinds_of(module)]
    return " and ".join(names).capitalize() if names else f"dovetail.contracts.{module}"


def _bundled(group: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["entry-points"].get(group, ()))


def _contract_page(module: str) -> str:
    lines = [f"# {title(module)}", ""]
    kinds = kinds_of(module)
    if kinds:
        lines += ["| kind | entry-point group | version | derive from | bundled |", "| --- | --- | --- | --- | --- |"]
    for name in kinds:
        kind = KINDS[name]
        written = f"[{name}](../{GUIDES[name]})" if name in GUIDES else name
        base = kind.base.replace(":", ".")
        bundled = ", ".join(f"`{each}`" for each in _bundled(kind.group))
        lines.append(
            f"| {written} | `{kind.group}` | {kind.version} | [`{kind.base.partition(':')[2]}`][{base}] | {bundled} |"
        )
    if module == "hooks":
        guide = "[how to write hooks](../writing/hooks.md)"
        lines.append(f"Entry-point group `{HOOKS_GROUP}`, version {HOOKS_VERSION}; {guide}.")
    return "\n".join([*lines, "", f"::: dovetail.contracts.{module}", ""])


def _contracts_index() -> str:
    lines = [
        "# Contracts",
        "",
        "One module per kind of plugin: an abstract class to derive from, and the records that cross it. A plugin",
        "imports nothing else of Dovetail but [dovetail.nn](../nn/index.md). The pages are made of the modules'",
        "docstrings; [Versions](../versioning.md) says what they promise.",
        "",
        "| kind | one implementation answers | contract | version |",
        "| --- | --- | --- | --- |",
    ]
    for name, kind in KINDS.items():
        module = kind.base.partition(":")[0].rpartition(".")[2]
        lines.append(f"| `{name}` | {kind.summary} | [{module}]({module}.md) | {kind.version} |")
    lines.append(f"| `hooks` | notifications of an engine's life | [hooks](hooks.md) | {HOOKS_VERSION} |")
    lines += ["", "Modules that several kinds share:", "", "| module | what it has |", "| --- | --- |"]
    for module in contract_modules():
        if not kinds_of(module) and module != "hooks":
            said = first_sentence(module_docstring(ROOT / "core" / "contracts" / f"{module}.py"))
            lines.append(f"| [{module}]({module}.md) | {said} |")
    return "\n".join([*lines, ""])


def _nn_index() -> str:
    lines = ["# dovetail.nn", "", "::: dovetail.nn", "", "## Modules", "", "| module | what it has |", "| --- | --- |"]
    for path, module in NN_FILES.items():
        if module != "dovetail.nn":
            page = PurePosixPath(nn_page(module)).name
            lines.append(f"| [{module}]({page}) | {first_sentence(module_docstring(ROOT / path))} |")
    return "\n".join([*lines, ""])


def _file_page(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"{UNLISTED}\n# {path}\n\n~~~~~~ {language}\n{text}\n~~~~~~\n"


def _folder_page(path: str) -> str:
    lines = [UNLISTED, f"# {path}/", "", "| file | what it has |", "| --- | --- |"]
    here = place(path)
    shown = set(listings())
    for entry in sorted((ROOT / path).iterdir()):
        name = entry.relative_to(ROOT).as_posix()
        if entry.name.startswith((".", "__pycache__")):
            continue
        label = f"`{entry.name}{'/' if entry.is_dir() else ''}`"
        target = place(name)
        if name in shown or not target.startswith("source/"):
            label = f"[{label}]({os.path.relpath(target, PurePosixPath(here).parent)})"
        lines.append(f"| {label} | {_said(entry)} |")
    return "\n".join([*lines, ""])


def _said(file: Path) -> str:
    """What a file says of itself, where it is one of Python."""
    return first_sentence(module_docstring(file)) if file.suffix == ".py" else ""
