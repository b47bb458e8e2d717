"""What executors are made of whose workers are processes of their own: on this machine, over SSH, in a cluster.

An author writes how a process is started and how bytes reach it; see docs/executors.md::

    class MyProcess(ChildProcess):            # or WorkerProcess, where no local process stands for it
        def connect(self, timeout_s): ...     # a multiprocessing.connection.Connection to `serve` in the worker

    class MyExecutor(ProcessExecutor):
        def launch(self, placement, environment, scratch): return MyProcess(...)

The worker's process calls `serve(connection)`. Plans, calls, answers, errors with their tracebacks, deaths, deadlines
and the orderly end are here. The names below are public and keep their meaning within a version of the executor's
contract; modules with an underscore are not.
"""

from dovetail.executors.processes.executor import ProcessExecutor, ProcessOptions
from dovetail.executors.processes.process import ChildProcess, WorkerProcess
from dovetail.executors.processes.worker import serve

__all__ = ["ChildProcess", "ProcessExecutor", "ProcessOptions", "WorkerProcess", "serve"]
