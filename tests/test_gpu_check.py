"""scripts/gpu_check.sh in its dry mode: the code that runs on a GPU, with a tiny model on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(out: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--null", "--out", str(out), *parts]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)


QUICK = ["machine", "operators", "quantization", "decode", "prefill"]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(QUICK, marks=(pytest.mark.nightly, pytest.mark.timeout(900))),
        pytest.param(["decode", "tokens", "breakdown", "serving"], marks=pytest.mark.kernels),
    ],
    ids=" ".join,
)
def test_parts_run_and_write_what_they_found(tmp_path: Path, parts: list[str]) -> None:
    done = run(tmp_path, *parts)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for part in parts:
        result = json.loads((tmp_path / f"{part}.json").read_text())
        assert result["dry"]
        assert all(row["good"] is not False for row in result["rows"])
    decode = json.loads((tmp_path / "decode.json").read_text())["rows"]
    assert any("share of the roofline" in row["what"] for row in decode)
    assert "decode      batch 4, context 256: speed" in done.stdout


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    done = run(tmp_path, "no_such_part", "machine")
    assert done.returncode == 1
    assert "there is no scripts/gpu_check/no_such_part.py" in done.stderr
    assert (tmp_path / "machine.json").exists()
    assert "failed: no_such_part" in done.stdout


KILLED = """
import os, signal, sys
from pathlib import Path
from common import Report

report = Report("decode", Path(sys.argv[1]), null=True)
report.add("batch 1: speed", 91.5, "tokens/s")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_part_that_is_killed_leaves_the_rows_that_it_had(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "gpu_check")}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=env)
    (line,) = (tmp_path / "decode.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "part": "decode",
        "dry": True,
        "what": "batch 1: speed",
        "value": 91.5,
        "unit": "tokens/s",
        "goal": "",
        "good": None,
    }


def test_the_limits_of_all_parts_are_under_nine_minutes() -> None:
    """And every part has one."""
    script = (ROOT / "scripts" / "gpu_check.sh").read_text()
    parts = re.search(r"parts=\((machine .*)\)", script)
    assert parts is not None
    limits = dict(re.findall(r"(\w+)\) echo (\d+) ;;", script))
    assert sum(int(limits[part]) for part in parts[1].split()) < 9 * 60
