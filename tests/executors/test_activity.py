"""What the driver reads of workers that do not answer."""

from __future__ import annotations

from pathlib import Path

from dovetail.executors.processes._activity import _stack, _stack_path

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
