"""Messages between the driver and the agent of a machine, each pickled, once both have proved that they have the
key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Tick(NamedTuple):
    """Sent by both sides now and then: what nobody acknowledges shows that a machine is gone."""


class Inspect(NamedTuple):
    """Asks for what is on the machine; answered by `Inspection`."""

    spec: bytes | None
    """A pickled `WorkerSpec` that is a `ComparesMachines`; None where it is none."""
    device_type: str


class Inspection(NamedTuple):
    """What is on a machine."""

    facts: Any
    """What `ComparesMachines.machine_facts` returned."""
    num_devices: int | None
    """GPUs that torch sees; None where none was asked for."""
    free_port: int
    clock_s: float
    """Seconds since 1970."""
    machine: str
    """Equal for nodes that are parts of one machine, whose cores their ranks share."""
    problem: str = ""
    """Why the facts could not be found out; empty where they were."""


class Start(NamedTuple):
    """Starts the process of a rank, which dials the driver with this token."""

    token: str
    rank: int
    environment: Mapping[str, str]
    num_ranks_here: int
    timeout_s: float
    """Seconds in which the agent takes a driver that acknowledges nothing for dead."""


class Signal(NamedTuple):
    """Sends a signal to the process of a rank."""

    token: str
    number: int


class Started(NamedTuple):
    """The process of a rank exists."""

    token: str
    pid: int


class NotStarted(NamedTuple):
    """The process of a rank could not be started."""

    token: str
    why: str


class Halted(NamedTuple):
    """The process of a rank was halted (SIGSTOP, a debugger), or goes on."""

    token: str
    is_halted: bool


class Ended(NamedTuple):
    """The process of a rank has ended."""

    token: str
    code: int
    """Exit code, or minus the number of the signal."""
