"""Goes the way of a new author: does what docs/tutorial.md says, word for word, in an environment of its own, and
prints how long that took and how many lines were written. Then the wheel goes into a second environment, where a
config chooses it.

python scripts/author_journey.py             in a temporary folder
python scripts/author_journey.py DIRECTORY   in this folder, which must not exist, and stays

Fails where a command fails, a limit is passed, or speculation changes the text. The environments see the packages of
the Python that runs this, and nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ruff.__main__ import find_ruff_bin

TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorial.md"
MAX_SECONDS = 600
MAX_LINES = 25
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHIM = '#!/bin/sh\nexec "{python}" -m {module} "$@"\n'
_PROMPT = "red green blue red green blue red green"


@dataclass(frozen=True)
class Block:
    """A fenced block of the tutorial."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block is, by the comment in its first line; None for commands."""
        first = self.text.partition("\n")[0]
        return None if self.language == "bash" else first.removeprefix("# ")

    @property
    def content(self) -> str:
        """A file's text without the line that names it."""
        return self.text if self.file is None else self.text.partition("\n")[2]


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [Block(match[1], match[2]) for match in _FENCE.finditer(page)]


def lines_written(page: str) -> int:
    """Lines of files that the reader writes, without empty ones."""
    files = [block.content for block in blocks(page) if block.file is not None]
    return sum(1 for text in files for line in text.splitlines() if line.strip())


def make_environment(folder: Path) -> dict[str, str]:
    """A virtual environment that also sees the packages of this one; returns the variables of a shell in it."""
    venv.create(folder, with_pip=True)
    scripts, python = folder / "bin", folder / "bin" / "python"
    standard = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    shown = [place for place in sys.path if Path(place).is_dir() and not _is_standard(Path(place), standard)]
    lines = [f"import site; site.addsitedir({place!r})" for place in shown if Path(place) != Path(__file__).parent]
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # Python 3.11 puts an old setuptools into new environments, which would hide the parent's.
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True, capture_output=True)
    (Path(purelib) / "packages_of_the_parent.pth").write_text("\n".join([*lines, ""]))
    for module in ("dovetail", "pytest"):
        (scripts / module).write_text(_SHIM.format(python=python, module=module))
        (scripts / module).chmod(0o755)
    (scripts / "ruff").symlink_to(find_ruff_bin())
    own = {"VIRTUAL_ENV": str(folder), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb"}
    # setuptools is there already, and no index is asked. For pip, false is what turns isolation off.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    return kept | own | offline


def _is_standard(place: Path, standard: set[Path]) -> bool:
    return place in standard or place.name == "lib-dynload"


class Reader:
    """Somebody who does what the page says: types commands into a shell, and writes files."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder = folder
        self.environment = environment

    def follow(self, page: str) -> Iterator[tuple[str, float]]:
        """Yields each command or file with its seconds. Raises `SystemExit` at the first command that fails."""
        for block in blocks(page):
            if block.file is not None:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.content)
                yield f"write {block.file}", 0.0
                continue
            for command in block.text.splitlines():
                begun = time.perf_counter()
                self.type(command)
                yield command, time.perf_counter() - begun

    def type(self, command: str) -> str:
        """Runs one line, and stays in the folder that it changes to; returns its output."""
        script = f"{command}\nstatus=$?\npwd > {str(self.folder / '.pwd')!r} 2> /dev/null\nexit $status"
        where = self.folder / ".pwd"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{command}\n{done.stdout}{done.stderr}failed with exit code {done.returncode}")
        self.folder = Path(where.read_text().strip())
        where.unlink()
        return done.stdout


def try_elsewhere(folder: Path, wheel: Path, config: Path) -> str:
    """Installs the wheel in a second environment, which never had its sources, and generates with the config there.

    Returns a sentence; raises `SystemExit` unless drafts are accepted and the tokens are those without speculation.
    """
    folder.mkdir()
    reader = Reader(folder, make_environment(folder / "environment"))
    reader.type(f"pip install -q --no-deps {wheel}")
    (folder / config.name).write_text(config.read_text())
    command = f'dovetail generate "{_PROMPT}" --config {config.name} --max-tokens 24 -s temperature=0 --json --stats'
    drafted, plain = (json.loads(reader.type(command + choice)) for choice in ("", " --speculative off"))
    metrics = drafted["metrics"]
    if drafted["token_ids"] != plain["token_ids"] or not metrics["num_accepted"] or metrics["drafter_error"]:
        sys.exit(f"speculation changes the text, or no draft was accepted: {drafted} {plain}")
    return (
        f"drafter {metrics['drafter']}, {metrics['num_accepted']} of {metrics['num_drafted']} drafts accepted, "
        "the tokens are those without speculation"
    )


def main(root: Path) -> None:
    """Goes the way, and prints it."""
    page = TUTORIAL.read_text(encoding="utf-8")
    workplace = root / "work"
    workplace.mkdir(parents=True)
    reader = Reader(workplace, make_environment(root / "environment"))
    total = 0.0
    for what, seconds in reader.follow(page):
        total += seconds
        print(f"{seconds:6.1f} s  {what}", flush=True)
    written = lines_written(page)
    print(f"{total:6.1f} s  in all, with {written} lines written")
    (wheel,) = workplace.glob("*/dist/*.whl")
    print(f"{wheel.name} in another environment: {try_elsewhere(root / 'elsewhere', wheel, workplace / 'engine.yaml')}")
    print(f"Python {platform.python_version()}, torch {version('torch')}, Dovetail {version('dovetail')}")
    if total >= MAX_SECONDS or written >= MAX_LINES:
        sys.exit(f"not under {MAX_SECONDS} seconds and {MAX_LINES} lines")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
