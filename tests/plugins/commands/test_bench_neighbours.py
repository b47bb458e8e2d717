"""Processes that compute while an engine is measured: they run, and they always end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from dovetail.plugins.commands.bench.cli import app
from dovetail.plugins.commands.bench.neighbours import neighbours
from dovetail.plugins.commands.bench.result import read_result
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

DRIVER = """
from dovetail.plugins.commands.bench.neighbours import neighbours
with neighbours(1) as (pid,):
    print(pid, flush=True)
    input()
"""


def test_neighbours_compute_in_their_threads_until_the_end() -> None:
    with neighbours(2, threads=2) as pids:
        processes = [psutil.Process(pid) for pid in pids]
        assert len(processes) == 2
        for process in processes:
            started = process.cpu_times().user
            while process.cpu_times().user <= started:  # the clock of CPU time goes on only while it computes
                pass
            assert process.num_threads() == 3
    assert not any(process.is_running() for process in processes)


def test_neighbours_end_after_an_error() -> None:
    found: list[psutil.Process] = []

    def measure() -> None:
        with neighbours(1) as pids:
            found.extend(map(psutil.Process, pids))
            raise RuntimeError("measured nothing")

    with pytest.raises(RuntimeError, match="measured nothing"):
        measure()
    assert not found[0].is_running()


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_neighbours_end_with_a_process_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        neighbour = psutil.Process(int(driver.stdout.readline()))
        driver.send_signal(signal.SIGKILL)
    psutil.wait_procs([neighbour], timeout=30)
    assert not neighbour.is_running() or neighbour.status() == psutil.STATUS_ZOMBIE


def test_a_result_says_beside_how_many_it_was_measured(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", tiny_config("llama", vocab_size=256))
    options = ("model.tokenizer_mode=none", "executor.threads=1", "attention=sdpa", "cache.num_blocks=40")
    engine = ["--model", str(tmp_path / "model"), *(part for option in options for part in ("-o", option))]
    sizes = ["--input-len", "8", "--output-len", "4", "--repeats", "1", "--json", str(tmp_path / "result.json")]
    found = CliRunner().invoke(app, ["latency", *engine, *sizes, "--neighbours", "1", "--neighbour-threads", "2"])
    assert found.exit_code == 0, found.output + repr(found.exception)
    procedure = read_result(tmp_path / "result.json").procedure
    assert (procedure["neighbours"], procedure["neighbour_threads"]) == (1, 2)
