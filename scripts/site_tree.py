"""Where the documentation site has the files of the repository, and which pages the site has beyond docs/.

A page under docs/ keeps its path. README.md is the start page. The modules of the contracts and the public ones of
`dovetail.nn` have pages made of their docstrings. Any other file or folder that a page links to has a page that shows
it, under source/, so that links work on the site as they do in the repository.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from surface_table import MODULES as PUBLIC

from dovetail.contracts.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXAMPLES = "examples/plugins"
"""The folder of distributions, whose READMEs are pages and whose files are all shown."""
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    f"{EXAMPLES}/README.md": "examples/index.md",
    **{
        readme.relative_to(ROOT).as_posix(): f"examples/{readme.parent.name}.md"
        for readme in sorted((ROOT / EXAMPLES).glob("*/README.md"))
    },
}
"""Pages from outside of docs/, and where the site has them."""
MODULES = {
    "core/contracts/__init__.py": "contracts/index.md",
    "core/contracts": "contracts/index.md",
    "nn": "nn/index.md",
}
LANGUAGES = {
    ".py": "python",
    ".c": "c",
    ".h": "c",
    ".yaml": "yaml",
    ".toml": "toml",
    ".json": "json",
    ".jinja": "jinja",
}
CODE = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Link:
    """A link within the repository, as a page writes it."""

    text: str
    path: str
    """From the root of the repository; the page's own, where the link is an anchor alone."""
    fragment: str
    """With its "#", or empty."""


def resolve(origin: str, target: str) -> tuple[str, str] | None:
    """Path from the root and fragment of a link's target; None where it leads out of the repository.

    Args:
        origin: The page with the link, from the root of the repository.
        target: As it is written.
    """
    if re.match(r"[a-z]+:", target):
        return None
    path, hash_, fragment = target.partition("#")
    if not path:
        return origin, hash_ + fragment
    try:
        found = (ROOT / origin).parent.joinpath(path).resolve().relative_to(ROOT)
    except ValueError:
        return None
    return found.as_posix(), hash_ + fragment


def place(path: str) -> str:
    """The site's page for a file or folder of the repository."""
    if path in MOVED:
        return MOVED[path]
    if f"{path}/README.md" in MOVED:
        return MOVED[f"{path}/README.md"]
    if path in MODULES:
        return MODULES[path]
    if path.startswith("docs/") and not path.startswith("docs/surface/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if path.startswith("core/contracts/") and path.endswith(".py"):
        return f"contracts/{PurePosixPath(path).stem}.md"
    if path in NN_FILES:
        return nn_page(NN_FILES[path])
    suffix = "/index.md" if (ROOT / path).is_dir() else ".md"
    return f"source/{path}{suffix}"


def nn_page(module: str) -> str:
    """The page of a module of `dovetail.nn`."""
    return f"nn/{module.removeprefix('dovetail.nn').removeprefix('.') or 'index'}.md"


def _nn_file(module: str) -> str:
    stem = module.replace("dovetail.", "").replace(".", "/")
    return f"{stem}/__init__.py" if (ROOT / stem).is_dir() else f"{stem}.py"


def _public_nn() -> list[str]:
    listed: list[str] = tomllib.loads((ROOT / PUBLIC).read_text(encoding="utf-8"))["dovetail.nn"]
    return listed


NN_FILES: Mapping[str, str] = {_nn_file(module): module for module in _public_nn()}
"""Files of the public modules of dovetail.nn, and their names."""


def contract_modules() -> list[str]:
    """Names of the contracts' modules, without their package."""
    return sorted(file.stem for file in (ROOT / "core" / "contracts").glob("*.py") if file.stem != "__init__")


def kinds_of(module: str) -> list[str]:
    """The kinds whose base class is in that module of the contracts."""
    return [name for name, kind in KINDS.items() if kind.base.startswith(f"dovetail.contracts.{module}:")]


@dataclass(frozen=True)
class Page:
    """A page with text from the repository."""

    origin: str
    """Its file, from the root of the repository."""

    @cached_property
    def text(self) -> str:
        return (ROOT / self.origin).read_text(encoding="utf-8")

    @cached_property
    def title(self) -> str:
        """Its first heading."""
        found = re.search(r"^# (.*)$", self.text, re.MULTILINE)
        return found[1] if found else self.origin

    def links(self) -> Iterator[Link]:
        """Its links within the repository, those in blocks of code left out."""
        for part in CODE.split(self.text)[::3]:
            for match in LINK.finditer(part):
                if (found := resolve(self.origin, match["target"])) is not None:
                    yield Link(match["text"], *found)


def pages() -> list[Page]:
    """All pages that are written by hand."""
    written = sorted(file.relative_to(ROOT).as_posix() for file in DOCS.rglob("*.md"))
    return [Page(origin) for origin in (*MOVED, *written)]


def example_files(folder: str) -> list[str]:
    """The files of an example that are worth reading, from the root of the repository."""
    files = (file.relative_to(ROOT) for file in (ROOT / folder).rglob("*.*") if file.suffix in LANGUAGES)
    made = {"build", "dist"}
    return sorted(file.as_posix() for file in files if not made & set(file.parts) and (ROOT / file).stat().st_size)


def listings() -> list[str]:
    """Files and folders that pages link to, and that only a listing shows; and all files of the examples."""
    linked = {link.path for page in pages() for link in page.links() if (ROOT / link.path).exists()}
    linked.update(example_files(EXAMPLES))
    return sorted(path for path in linked if place(path).startswith("source/"))


def module_docstring(path: Path) -> str:
    """The docstring of a Python file, empty where it has none."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def first_sentence(docstring: str) -> str:
    """Its first paragraph, up to the first full stop."""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", paragraph, maxsplit=1)[0].rstrip(":") if paragraph else ""
