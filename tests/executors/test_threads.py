"""Threads per worker."""

from pathlib import Path

import pytest

from dovetail.contracts.executor import ThreadCount
from dovetail.executors import _threads


def test_the_config_comes_first_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _threads.worker_threads(3).count == 3
    assert _threads.worker_threads(None, num_workers=2) == ThreadCount(5, "OMP_NUM_THREADS")


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(_threads, "usable_cores", lambda: 8)
    assert [_threads.worker_threads(None, n).count for n in (1, 3, 16)] == [8, 2, 1]


@pytest.mark.parametrize(("text", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", None)])
def test_a_container_quota_counts(tmp_path: Path, text: str, cores: int | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert _threads._cgroup_cores(path) == cores
