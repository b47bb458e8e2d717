"""How flags may be spelt."""

from __future__ import annotations

import pytest

from dovetail.commands.main import Switches, create_group
from dovetail.registry.registry import Registry


@pytest.mark.parametrize(
    ("flag", "answer"),
    [("--max_model_len", "Invalid value for '--max-model-len'"), ("--max_model_lem", "No such option")],
)
def test_flags_take_underscores(capsys: pytest.CaptureFixture[str], flag: str, answer: str) -> None:
    with pytest.raises(SystemExit):
        create_group(Registry.scan(), Switches()).main(["explain", flag, "many"], prog_name="dovetail")
    assert answer in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--max-model-lem", "--max-model-len"), ("--gpu_memory_utilisation", "--gpu-memory-utilization")],
)
def test_an_unknown_flag_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str], flag: str, near: str) -> None:
    with pytest.raises(SystemExit) as ended:
        create_group(Registry.scan(), Switches()).main(["serve", "./model", flag, "1"], prog_name="dovetail")
    assert ended.value.code == 2
    assert near in capsys.readouterr().err
