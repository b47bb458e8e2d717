"""The size of the tree, counted with `ast`: lines and functions per folder, and the largest of each.

python scripts/size_report.py                  prints the report
python scripts/size_report.py --write FILE     writes it
python scripts/size_report.py --check FILE     fails where a limit is passed, or the written report is missing
"""

from __future__ import annotations

import ast
import statistics
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dovetail"]["folders"].values())
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 165
"""Of a Triton kernel, whose pointers, strides and constants are arguments, most on a line of their own, and whose inner
loops call one function with most of them."""


@dataclass(frozen=True)
class Function:
    """One function or method."""

    place: str
    lines: int
    is_annotated: bool
    is_kernel: bool

    @property
    def most_lines(self) -> int:
        """How long it may be."""
        return MAX_KERNEL_LINES if self.is_kernel else MAX_FUNCTION_LINES


@dataclass(frozen=True)
class File:
    """One source file."""

    path: str
    lines: int
    functions: tuple[Function, ...]


def read_file(path: Path) -> File:
    """Counts one file."""
    source = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    functions = tuple(
        Function(
            f"{name}:{node.name}",
            (node.end_lineno or node.lineno) - node.lineno + 1,
            node.returns is not None,
            any("jit" in ast.unparse(decorator) for decorator in node.decorator_list),
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return File(name, source.count("\n"), functions)


def row(title: str, files: list[File]) -> str:
    """One line of the table."""
    functions = [function for file in files for function in file.functions]
    lengths = sorted(function.lines for function in functions) or [0]
    p90 = lengths[int(0.9 * (len(lengths) - 1))]
    over = sum(length > 50 for length in lengths) / len(lengths)
    annotated = sum(function.is_annotated for function in functions) / max(len(functions), 1)
    return (
        f"| {title} | {sum(file.lines for file in files):,} / {len(files)} | {max(file.lines for file in files)} |"
        f" {statistics.median(lengths):.0f}/{p90}/{lengths[-1]} | {over:.1%} | {annotated:.0%} |"
    )


def report(files: list[File]) -> str:
    """The page."""
    lines = [
        "# Size of the tree",
        "",
        "Made by `make docs`. Fn is function length in lines: median / 90th percentile / longest; >50 the share of",
        "functions over 50 lines; ann the share with a return annotation.",
        "",
        "| folder | lines / files | largest file | Fn | >50 | ann |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [row(f"{folder}/", [f for f in files if f.path.startswith(f"{folder}/")]) for folder in FOLDERS]
    lines += [row("all", files), "", "## Largest files", ""]
    lines += [f"- {file.path}: {file.lines}" for file in sorted(files, key=lambda f: -f.lines)[:10]]
    lines += ["", "## Longest functions", ""]
    functions = sorted((function for file in files for function in file.functions), key=lambda f: -f.lines)
    lines += [f"- {function.place}: {function.lines}" for function in functions[:10]]
    return "\n".join(lines) + "\n"


def violations(files: list[File]) -> list[str]:
    """What passes the limits."""
    found = [f"{file.path}: {file.lines} lines" for file in files if file.lines > MAX_FILE_LINES]
    for file in files:
        found += [f"{f.place}: {f.lines} lines" for f in file.functions if f.lines > f.most_lines]
    return found


def main(arguments: list[str]) -> int:
    """Prints, writes or checks."""
    files = [read_file(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    page = report(files)
    if arguments[:1] == ["--write"]:
        Path(arguments[1]).write_text(page, encoding="utf-8")
        return 0
    if arguments[:1] == ["--check"]:
        found = violations(files)
        for line in found:
            print(f"too large, look for the seam: {line}", file=sys.stderr)
        if not Path(arguments[1]).is_file():
            found.append(f"{arguments[1]} is missing: make docs")
        return 1 if found else 0
    print(page, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
