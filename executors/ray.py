"""The `ray` executor: Ray places an agent on each machine and watches it; plans go over sockets of our own."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import PluginError, WorkerError
from dovetail.contracts.executor import ExecutorNeed
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.executors.nodes.base import NodesExecutor, NodesOptions
from dovetail.executors.nodes.hub import Hub

_MISSING = "the package ray is not installed: pip install 'dovetail[ray]'"


class RayOptions(NodesOptions):
    """Options of `ray`."""

    address: str | None = None
    """Address of a cluster that runs ("auto", "10.0.0.1:6379"); None: the one this process is connected to, else one
    is started on this machine."""
    nodes: int = Field(default=1, ge=1)
    """Machines, or parts of machines, over which Ray spreads the ranks."""
    strategy: str = Field(default="SPREAD", pattern="^(SPREAD|STRICT_SPREAD|PACK|STRICT_PACK)$")
    """How Ray places them. SPREAD: on different machines where there are as many."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs that each rank reserves in Ray."""
    driver_address: str | None = None
    """IP address by which the machines reach this process; None: as Ray knows this machine."""


class RayExecutor(NodesExecutor):
    """An actor per machine runs the agent that `python -m dovetail.worker` is; see `NodesExecutor`."""

    Options: ClassVar[type[PluginOptions]] = RayOptions
    options: RayOptions

    def __init__(self, options: RayOptions, spec: Any, need: ExecutorNeed):
        super().__init__(options, spec, need)
        self._group: Any = None
        self._actors: list[Any] = []
        self._began_ray = False

    @classmethod
    def check(cls, need: ExecutorNeed, options: Any, environment: Environment) -> list[str]:
        """Refuses where Ray is not installed, and nodes over which the ranks cannot be spread."""
        missing = [] if "ray" in environment.packages else [_MISSING]
        return missing + cls.check_nodes(need, options, options.nodes)

    def num_nodes(self) -> int:
        """The option `nodes`."""
        return self.options.nodes

    def open(self) -> Hub:
        """Listens at a free port, and has Ray start an agent per node, with a key made for this executor."""
        ray = _import_ray()
        key = secrets.token_hex(32)
        if not ray.is_initialized():
            ray.init(address=self.options.address, include_dashboard=False, log_to_driver=True)
            self._began_ray = True
        try:
            host = self.options.driver_address or ray.util.get_node_ip_address()
            names = [f"{index}" for index in range(self.options.nodes)]
            hub = Hub(("0.0.0.0", 0), key.encode(), self.options.node_timeout_s, len(names), names)
            try:
                self._place(ray, f"{host}:{hub.port}", key)
            except BaseException:
                hub.close()
                raise
        except BaseException:
            self._release()
            raise
        return hub

    def start(self) -> None:
        """As `NodesExecutor.start`; the actors end where it fails."""
        try:
            super().start()
        except BaseException:
            self._release()
            raise

    def shutdown(self) -> None:
        """Ends the workers, the actors and what they reserved; and Ray, if this executor began it."""
        super().shutdown()
        self._release()

    def _place(self, ray: Any, join: str, key: str) -> None:
        per_node = -(-self.need.num_ranks // self.options.nodes)
        bundle = {"CPU": self.options.num_cpus * per_node}
        if self.need.device_type == "cuda":
            bundle["GPU"] = float(per_node)
        group = ray.util.placement_group([bundle] * self.options.nodes, strategy=self.options.strategy)
        self._group = group
        if not group.wait(timeout_seconds=self.options.join_timeout_s):
            raise WorkerError(
                f"Ray has no place for {self.options.nodes} nodes with {bundle} each after"
                f" {self.options.join_timeout_s:g} s; the cluster has {ray.cluster_resources()}: lower executor.nodes"
                " or executor.num_cpus, or add machines"
            )
        actor = ray.remote(NodeActor)
        strategies = ray.util.scheduling_strategies
        for index in range(self.options.nodes):
            strategy = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            chosen = actor.options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy, max_restarts=0
            )
            self._actors.append(chosen.remote())
        for index, one in enumerate(self._actors):
            one.run.remote(join, key, str(index))

    def _release(self) -> None:
        if self._group is None and not self._began_ray:
            return
        ray = _import_ray()
        with contextlib.suppress(Exception):  # the cluster may be gone
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._actors, self._group = [], None
        if self._began_ray:
            self._began_ray = False
            ray.shutdown()


class NodeActor:
    """Runs the agent of one machine as a child, which ends with this actor."""

    def run(self, join: str, key: str, name: str) -> int:
        """Returns the agent's exit code once the driver is gone."""
        with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
            path = Path(folder) / "key"
            path.touch(mode=0o600)
            path.write_text(key)
            command = [sys.executable, "-P", "-m", "dovetail.worker", "--join", join, "--key-file", str(path)]
            command += ["--name", name, "--once", "--end-with-parent"]
            with subprocess.Popen(command, env=_environment()) as agent:
                return agent.wait()


def _environment() -> dict[str, str]:
    """Without the threads that Ray sets: each rank has its own number."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def _import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise PluginError(_MISSING) from error
    return ray
