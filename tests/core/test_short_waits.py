"""How torch's threads wait is settled before torch is loaded, and only where the user has not settled it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.short_waits import import_torch, short_waits

PROGRAM = """
import os, sys
sys.path.insert(0, {folder!r})  # a torch that says what it finds when it is loaded
from dovetail.short_waits import import_torch
print(import_torch(), os.environ.get("GOMP_SPINCOUNT"), sys.modules["torch"].found)
"""


@pytest.mark.parametrize(
    ("own", "printed"),
    [
        ({}, "True None 5000"),
        ({"GOMP_SPINCOUNT": "7"}, "True 7 7"),
        ({"OMP_WAIT_POLICY": "active"}, "True None None"),
    ],
)
def test_the_environment_is_set_while_torch_is_loaded(own: dict[str, str], printed: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('import os\nfound = os.environ.get("GOMP_SPINCOUNT")\n')
    program = PROGRAM.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True)
    assert done.stdout.split() == printed.split()


def test_what_was_loaded_before_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: F401

    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert not import_torch.__wrapped__()


def test_a_choice_of_the_user_stays() -> None:
    assert short_waits({"OMP_WAIT_POLICY": "passive"}) == {}
    assert short_waits({"PATH": "/bin"}) == {"GOMP_SPINCOUNT": "5000"}
