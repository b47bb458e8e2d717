"""What the driver reads of workers that do not answer."""

from __future__ import annotations

from pathlib import Path

from dovetail.executors.processes._activity import Sighting, _stack, _stack_path, suspects
from dovetail.worker import stage_link

STACK = """Thread 0x1 (most recent call first):
  File "/a/threading.py", line 10 in wait

Current thread 0x2 (most recent call first):
  File "/a/executors/processes/worker.py", line 20 in wait
  File "<string>", line 1 in <module>
"""


def test_a_stack_is_read_once_all_of_it_is_written(tmp_path: Path) -> None:
    for length in range(len(STACK)):
        _stack_path(str(tmp_path), 0).write_text(STACK[:length])
        frames = _stack(str(tmp_path), 0)
        assert frames == () or frames[0] == "wait (/a/executors/processes/worker.py:20)"
    _stack_path(str(tmp_path), 0).write_text(STACK)
    assert len(_stack(str(tmp_path), 0)) == 2


def test_a_stage_that_waits_for_another_is_no_suspect() -> None:
    """The first stage cannot send before the second takes what came before; the third waits for states."""
    stacks = (f"send ({stage_link.__file__}:82)", "sleep (/a/plugin.py:3)", "recv (/a/torch/distributed/x.py:7)")
    seen = [Sighting(rank, "pid 1", "began step 7", False, (stack,)) for rank, stack in enumerate(stacks)]
    assert suspects(seen, waiting={2}) == [seen[1]]
