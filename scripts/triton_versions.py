"""Compiles every kernel, without a GPU, with each Triton that a torch which pyproject.toml allows asks for.

    python scripts/triton_versions.py                        # the versions below; exit status 1 where a kernel fails
    python scripts/triton_versions.py --version 3.8.0 --arch 90

Each Triton goes into .tritons/VERSION, which a Python of its own finds first; the environment keeps its own. Prints
registers a thread and bytes of stack, or the problem, and runs the tests of what looks into Triton with each version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".tritons"
PINNED = {"3.6.0": "2.11.0", "3.7.0": "2.12.0", "3.7.1": "2.12.1"}
"""Triton -> the versions of torch whose metadata requires exactly it."""
TESTS = (
    "tests/testing/test_kernel_checks.py",
    "tests/testing/test_kernel_compiles.py",
    "tests/nn/test_triton_check.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles every kernel with each Triton.")
    parser.add_argument("--version", nargs="+", default=list(PINNED))
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 80])
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    failed: list[str] = []
    for version in arguments.version:
        environment = with_triton(version)
        found += compiled(version, arguments.arch, environment)
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        if subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(f"{version}: tests")
    print_table(found)
    failed += [
        f"{row['version']}, sm_{row['arch']}, {row['kernel']}: {row['problem']}" for row in found if row["problem"]
    ]
    if failed:
        sys.exit("\n".join(failed))


def with_triton(version: str) -> dict[str, str]:
    """The environment of a process that imports this Triton, which is fetched if it is not there."""
    folder = FOLDER / version
    if not (folder / f"triton-{version}.dist-info").is_dir():
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--upgrade", "--target", str(folder), f"triton=={version}"], check=True)
    others = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    path = os.pathsep.join([str(folder), *others])
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return without | {"PYTHONPATH": path}


def compiled(version: str, archs: Iterable[int], environment: dict[str, str]) -> list[dict[str, Any]]:
    """What scripts/aot_check.py finds with it."""
    command = [sys.executable, str(ROOT / "scripts" / "aot_check.py"), "--arch", *map(str, archs)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if {row["version"] for row in rows} != {version}:
        raise RuntimeError(f"not Triton {version} was imported from {FOLDER / version}, but {rows[:1]}")
    return rows


def print_table(found: list[dict[str, Any]]) -> None:
    """One row per kernel, one column per version and architecture."""
    cells = {(row["kernel"], row["version"], row["arch"]): row for row in found}
    columns = list(dict.fromkeys((version, arch) for _, version, arch in cells))
    print(f"| kernel | {' | '.join(f'{version} sm_{arch}' for version, arch in columns)} |")
    print(f"| --- |{' --- |' * len(columns)}")
    for kernel in dict.fromkeys(kernel for kernel, _, _ in cells):
        row = (cells.get((kernel, *column)) for column in columns)
        print(f"| {kernel} | {' | '.join('' if cell is None else cell_text(cell) for cell in row)} |")


def cell_text(cell: dict[str, Any]) -> str:
    """Registers and stack; with a mark where the kernel is over a limit."""
    return f"{cell['registers']}, {cell['stack_bytes']}" + (" !" if cell["problem"] else "")


if __name__ == "__main__":
    main()
