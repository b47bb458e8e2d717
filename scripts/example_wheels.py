"""Builds the distributions of examples/plugins as wheels, and tries them where users would: in an environment that has
the wheel of Dovetail and no source tree. Run by `make wheel-examples`.

python scripts/example_wheels.py PYTHON DIRECTORY [TURNS]    PYTHON is that environment's; what is built goes to
                                                             DIRECTORY

Each is installed by itself: its own tests run, the slow ones too, then it is compared with the bundled plugin of its
kind (scripts/compare_examples.py), and removed. Then all are installed and compared together. Prints the comparisons as
a table, with the speeds of TURNS timed turns; without TURNS, tokens alone are compared. Exit code 1 where tests fail,
or tokens differ that must not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from outsider_wheels import ROOT, build_wheel

EXAMPLES = ROOT / "examples" / "plugins"
HEADER = "| plugin | executor, ranks | tokens equal to the bundled one's |"
SPEEDS = " tokens/s, bundled | tokens/s, plugin | ratio |"


class Trial:
    """One environment, and one folder outside the source tree."""

    def __init__(self, python: Path, directory: Path, num_turns: int):
        # Not resolved: a link to the interpreter of an environment is what makes it one.
        self._python = python.absolute()
        self._directory = directory.absolute()
        self._num_turns = num_turns
        self.failures: list[str] = []
        self.rows: list[str] = []

    def build(self, name: str) -> Path:
        """The folder with what the author has besides the wheel: tests, pyproject.toml, compare.yaml."""
        project, run_folder = self._directory / "src" / name, self._directory / "run" / name
        shutil.copytree(EXAMPLES / name, project, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        build_wheel(project, self._directory / "dist" / name)
        run_folder.mkdir(parents=True)
        for file in ("pyproject.toml", "compare.yaml"):
            shutil.copy(project / file, run_folder)
        shutil.copytree(project / "tests", run_folder / "tests")
        return run_folder

    def install(self, names: Sequence[str]) -> None:
        """As users do, with what they depend on."""
        wheels = [str(wheel) for name in names for wheel in (self._directory / "dist" / name).glob("*.whl")]
        assert len(wheels) == len(names)
        self._pip("install", "--no-compile", "-c", str(ROOT / "constraints.txt"), *wheels)

    def remove(self, names: Sequence[str]) -> None:
        """Also what an earlier run may have left."""
        self._pip("uninstall", "--yes", *names)

    def test(self, run_folder: Path) -> None:
        """Runs the distribution's own tests."""
        options = ["-q", "-c", "pyproject.toml", "--rootdir", ".", "-p", "no:cacheprovider"]
        if self._run(["-m", "pytest", *options, "tests"], run_folder).returncode:
            self.failures.append(f"{run_folder.name}: its tests fail")

    def compare(self, folders: Sequence[Path], what: str) -> None:
        """Adds to `rows`."""
        script = shutil.copy(ROOT / "scripts" / "compare_examples.py", self._directory)
        arguments = [str(script), f"--turns={self._num_turns}", *map(str, folders)]
        done = self._run(arguments, self._directory, stdout=subprocess.PIPE)
        if done.returncode:
            self.failures.append(f"{what}: the comparison fails")
        for line in done.stdout.splitlines():
            found = json.loads(line)
            row = f"| {found['what']} | {found['executor']}, {found['ranks']} | {found['equal']:.1%} |"
            if self._num_turns:
                ratio = found["ours"] / found["bundled"]
                row += f" {found['bundled']:.0f} | {found['ours']:.0f} | {ratio:.2f} |"
            self.rows.append(row)

    def check_environment(self, names: Sequence[str]) -> None:
        """Dovetail comes from its wheel, and these and no other examples are installed."""
        code = (
            "import dovetail, sys, pathlib; from importlib import metadata\n"
            "assert pathlib.Path(dovetail.__file__).is_relative_to(sys.prefix), dovetail.__file__\n"
            "print(*sorted(d.name for d in metadata.distributions() if d.name.startswith('dovetail-')))\n"
        )
        done = self._run(["-c", code], self._directory, stdout=subprocess.PIPE)
        assert done.stdout.split() == sorted(names), done.stdout

    def _pip(self, *arguments: str) -> None:
        self._run(["-m", "pip", "--disable-pip-version-check", "-q", *arguments], self._directory).check_returncode()

    def _run(
        self, arguments: Sequence[str], folder: Path, stdout: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [str(self._python), *arguments], cwd=folder, env=environment, stdout=stdout, text=True, check=False
        )


def main(python: Path, directory: Path, num_turns: int = 0) -> int:
    """Exit code."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    trial = Trial(python, directory, num_turns)
    names = sorted(path.parent.name for path in EXAMPLES.glob("*/pyproject.toml"))
    trial.remove(names)
    folders = [trial.build(name) for name in names]
    for name, run_folder in zip(names, folders, strict=True):
        print(f"== {name}", flush=True)
        trial.install([name])
        trial.check_environment([name])
        trial.test(run_folder)
        trial.compare([run_folder], name)
        trial.remove([name])
    print("== all together", flush=True)
    trial.install(names)
    trial.check_environment(names)
    trial.compare(folders, "together")
    header = HEADER + SPEEDS if num_turns else HEADER
    print(header, "| --- " * (header.count("|") - 1) + "|", *trial.rows, *trial.failures, sep="\n")
    return 1 if trial.failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])))
