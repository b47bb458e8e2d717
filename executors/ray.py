"""The `ray` executor: Ray places an agent on each machine and watches it; plans go over sockets of our own."""

from __future__ import annotations

import secrets
import weakref
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import ExecutorNeed, ExpectedWorkers
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.executors._ray_nodes import MISSING, RayNodes, import_ray, reason_against
from dovetail.executors.nodes.base import NodesExecutor, NodesOptions
from dovetail.executors.nodes.hub import Hub
from dovetail.executors.nodes.spread import ranks_of_nodes


class RayOptions(NodesOptions):
    """Options of `ray`."""

    address: str | None = None
    """Address of a cluster that runs ("auto", "10.0.0.1:6379"); None: the one this process is connected to, else that
    of the variable RAY_ADDRESS (a replica of Ray Serve has its cluster's), else one is started on this machine. Another
    than this process is connected to is refused."""
    nodes: int | None = Field(default=None, ge=1)
    """Machines, or parts of machines, over which Ray spreads the ranks. None: one per pipeline stage, so that each
    tensor-parallel group is on one machine."""
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
        self._ray_nodes: RayNodes | None = None

    @classmethod
    def check(cls, need: ExecutorNeed, options: Any, environment: Environment) -> list[str]:
        """Refuses where Ray is not installed, and nodes over which the ranks cannot be spread."""
        reasons = [] if "ray" in environment.packages else [MISSING]
        if need.device_type != "cuda" and not options.num_cpus:
            reasons.append("executor.num_cpus is 0, so that ranks on CPUs would reserve nothing: Ray places them by it")
        return reasons + cls.check_nodes(need, options, options.nodes or need.pipeline_parallel)

    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: RayOptions) -> ExpectedWorkers:
        """On the machines that Ray will choose."""
        count = options.nodes or need.pipeline_parallel
        return cls.expect_on(need, [f"a node that Ray chooses ({index} of {count})" for index in range(1, count + 1)])

    def num_nodes(self) -> int:
        """The option `nodes`, or one per stage."""
        return self.options.nodes or self.need.pipeline_parallel

    def open(self) -> Hub:
        """Listens at a free port, and has Ray start an agent per node, with a key made for this executor."""
        ray = import_ray()
        key = secrets.token_hex(32)
        begins = not ray.is_initialized()
        if begins:
            ray.init(address=self.options.address, include_dashboard=False, log_to_driver=True)
        elif self.options.address is not None:
            connected = ray.get_runtime_context().gcs_address
            reason = reason_against(self.options.address, connected, ray.util.get_node_ip_address())
            if reason:
                raise PluginError(reason)
        self._ray_nodes = nodes = RayNodes(began_ray=begins)
        weakref.finalize(self, nodes.release).atexit = False  # Ray itself ends them with this process
        try:
            host = self.options.driver_address or ray.util.get_node_ip_address()
            names = [f"{index}" for index in range(self.num_nodes())]
            advice = (
                f"Their agents, which Ray started, dial {host}:{{port}}: set executor.driver_address to an address of"
                " this machine that the others reach, and look for the output of NodeActor in Ray's logs"
            )
            timeout_s = self.options.node_timeout_s
            hub = Hub(("0.0.0.0", 0), key.encode(), timeout_s, len(names), names, advice, word_on=nodes.word_on)
            try:
                join = f"{host}:{hub.port}"
                nodes.start(self._bundles(), self.options.strategy, self.options.join_timeout_s, join, key)
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

    def _bundles(self) -> list[dict[str, float]]:
        """What the ranks of each node reserve together: Ray finds one machine for each."""
        nodes = ranks_of_nodes(self.need, self.num_nodes())
        is_cuda = self.need.device_type == "cuda"
        bundles = []
        for index in range(self.num_nodes()):
            num_ranks = nodes.count(index)
            amounts = {"CPU": self.options.num_cpus * num_ranks, "GPU": float(num_ranks if is_cuda else 0)}
            bundles.append({name: amount for name, amount in amounts.items() if amount})
        return bundles

    def _release(self) -> None:
        if self._ray_nodes is not None:
            self._ray_nodes.release()
