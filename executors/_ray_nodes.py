"""What Ray does for one executor: reserves bundles, keeps an agent on each, and says how an agent's actor ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from dovetail.contracts.errors import PluginError, WorkerError

MISSING = "the package ray is not installed: pip install 'dovetail[ray]'"
_WORD_S = 0.5
"""Seconds in which Ray may say how an actor ended. It knows of a dead process at once, of a dead machine much later."""
_SHOWN = ("CPU", "GPU")


class RayNodes:
    """A placement group, and an actor in each of its bundles. Its methods are called by several threads. `began_ray`:
    Ray itself is to end with them."""

    def __init__(self, began_ray: bool) -> None:
        self._ray = import_ray()
        self._began_ray = began_ray
        self._owner_pid = os.getpid()
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def start(self, bundles: Sequence[dict[str, float]], strategy: str, timeout_s: float, join: str, key: str) -> None:
        """Reserves the bundles, and starts an agent in each: node "0" in the first. Raises `WorkerError` where Ray has
        no place for them in time."""
        ray = self._ray
        self._group = ray.util.placement_group(list(bundles), strategy=strategy)
        if not self._group.wait(timeout_seconds=timeout_s):
            raise WorkerError(_no_place(ray, bundles, strategy, timeout_s))
        actor = ray.remote(NodeActor)
        for index, bundle in enumerate(bundles):
            chosen = actor.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
                max_restarts=0,
            )
            self._actors.append(chosen.remote())
        self._runs = [one.run.remote(join, key, str(index)) for index, one in enumerate(self._actors)]

    def word_on(self, name: str) -> str:
        """Returns what Ray says on a node whose agent is gone, as a clause. Takes half a second at most."""
        ray = self._ray
        if not ray.is_initialized() or not self._runs:  # ray.get would start a cluster
            return "Ray was not asked: this process is no longer connected to it"
        try:
            code = ray.get(self._runs[int(name)], timeout=_WORD_S)
        except ray.exceptions.GetTimeoutError:
            return f"Ray did not say why within {_WORD_S:g} s (it takes a lost machine for dead later: ray list nodes)"
        except ray.exceptions.RayError as error:
            return f"Ray says: {_in_one_line(str(error))}"
        except Exception as error:  # of its client, or of a connection that ends now
            return f"Ray cannot be asked why ({error!r})"
        return f"Ray says: its actor lives, and the agent exited with code {code}"

    def release(self) -> None:
        """Ends the actors and gives back what they reserved; and Ray, if it is to end with them. Idempotent; does
        nothing in a process that was forked off the owner's."""
        if os.getpid() != self._owner_pid:
            return
        actors, group = self._actors, self._group
        self._actors, self._group, self._runs = [], None, []
        with contextlib.suppress(Exception):  # the cluster may be gone
            for actor in actors:
                self._ray.kill(actor)
            if group is not None:
                self._ray.util.remove_placement_group(group)
        if self._began_ray:
            self._began_ray = False
            self._ray.shutdown()


class NodeActor:
    """Runs the agent of one machine as a child, which ends with this actor."""

    def run(self, join: str, key: str, name: str) -> int:
        """Returns the agent's exit code once the driver is gone."""
        # By a pipe: Ray ends actors by a signal, and nobody would remove a file.
        reads, writes = os.pipe()
        with open(writes, "w") as pipe:
            pipe.write(key)
        command = [sys.executable, "-P", "-m", "dovetail.worker", "--join", join, "--key-file", f"/dev/fd/{reads}"]
        command += ["--name", name, "--once", "--end-with-parent"]
        with subprocess.Popen(command, env=_environment(), pass_fds=[reads]) as agent:
            os.close(reads)
            return agent.wait()


def import_ray() -> Any:
    """Returns the package. Raises `PluginError` where it is missing."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise PluginError(MISSING) from error
    return ray


def reason_against(address: str, connected: str, own_host: str) -> str:
    """Returns why an executor for the cluster at `address` cannot use the one at `connected`; empty where it can.
    `own_host`: this machine's address, as Ray knows it."""
    if address == "auto" or _resolved(address, own_host) == _resolved(connected, own_host):
        return ""
    return (
        f"executor.address is {address}, and this process is connected to the Ray cluster at {connected} already: leave"
        " executor.address out to use that one, or call ray.shutdown() first"
    )


def _resolved(address: str, own_host: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return own_host if host.startswith("127.") else host, port


def _environment() -> dict[str, str]:
    """Without the threads that Ray sets: each rank has its own number."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def _in_one_line(text: str) -> str:
    """An actor's error of Ray without the ids of its own::

    The actor died unexpectedly before finishing this task.
    <tab>class_name: NodeActor
    <tab>pid: 815
    The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR ...
    """
    wanted = [line for line in text.splitlines() if not line.startswith("\t") or line.strip().startswith(("pid", "ip"))]
    return " ".join(" ".join(wanted).split()).rstrip(".")


def _no_place(ray: Any, bundles: Sequence[dict[str, float]], strategy: str, timeout_s: float) -> str:
    totals = [
        {name: node["Resources"][name] for name in _SHOWN if name in node["Resources"]}
        for node in ray.nodes()
        if node["Alive"]
    ]
    largest = max(bundles, key=lambda bundle: sorted(bundle.items()))
    text = (
        f"Ray has no place for {len(bundles)} nodes with {largest} each ({strategy}) after {timeout_s:g} s; its nodes"
        f" have {totals}"
    )
    if any(all(total.get(name, 0) >= amount for name, amount in largest.items()) for total in totals):
        return (
            f"{text}, and other work may hold a part of it: lower executor.nodes or executor.num_cpus, or add machines"
        )
    return (
        f"{text}, none of which holds that: lower executor.num_cpus, add larger machines, or raise executor.nodes to a"
        " multiple of the pipeline stages, so that each tensor-parallel group is split over nodes in equal parts"
        " (slower: its ranks talk in every layer)"
    )
