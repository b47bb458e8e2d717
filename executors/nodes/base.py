"""The base of executors whose workers run on several machines, each with an agent."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from dovetail.contracts.device import Runtime
from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import (
    ExecutorCapabilities,
    ExecutorNeed,
    ExpectedWorkers,
    Placement,
    WorkerLayout,
    WorkerSpec,
)
from dovetail.contracts.joining import COMPARED_PACKAGES, ComparesMachines
from dovetail.contracts.plugin import PluginOptions
from dovetail.executors._graphs import GraphSizes, against_sizes, wanted_sizes
from dovetail.executors.nodes.hub import Hub
from dovetail.executors.nodes.links import NodeLink, NodeProcess
from dovetail.executors.nodes.messages import Inspect, Inspection
from dovetail.executors.nodes.spread import ranks_of_nodes, reasons_against_spread
from dovetail.executors.nodes.variables import checked_pattern, variables_for_nodes
from dovetail.executors.processes import ProcessExecutor, ProcessOptions

_log = logging.getLogger(__name__)


class NodesOptions(ProcessOptions):
    """Options of executors on several machines."""

    join_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds in which all nodes must have joined."""
    node_timeout_s: float = Field(default=1.0, ge=0.2)
    """Seconds in which a node that acknowledges nothing is taken for dead (Linux). Its system acknowledges, not the
    process, so a busy or halted one is not meant; raise it for networks that fail for longer."""
    max_clock_difference_s: float = Field(default=5.0, gt=0)
    """Difference between clocks above which a warning is logged. Only time stamps in logs depend on clocks: timeouts
    are measured on one machine each."""
    environment: tuple[Annotated[str, AfterValidator(checked_pattern)], ...] = ()
    """Further variables of the engine's environment that each rank gets, by name or by a prefix that ends in `*`; see
    `dovetail.executors.nodes.variables`."""
    cuda_graphs: GraphSizes = "auto"
    """On GPUs: batch sizes for which decode and verify steps are captured, on every rank alike; "off", or
    executor.enforce_eager: none."""


class NodesExecutor(ProcessExecutor):
    """Starts ranks through agents. A subclass says how agents come to join (`gather`)."""

    contract: ClassVar[tuple[int, int]] = (1, 8)
    Options: ClassVar[type[PluginOptions]] = NodesOptions
    preference: ClassVar[int] = -10
    capabilities = ExecutorCapabilities(
        device_types=frozenset({"cpu", "cuda"}), tensor_parallel=None, pipeline_parallel=None, enforce_eager=True
    )
    options: NodesOptions

    def __init__(self, options: NodesOptions, spec: WorkerSpec, need: ExecutorNeed):
        super().__init__(options, spec, need)
        self._hub: Hub | None = None
        self._nodes: Sequence[NodeLink] = ()
        self._machines: Sequence[str] = ()

    @abstractmethod
    def open(self) -> Hub:
        """Returns a hub that listens, to which agents find their way."""

    @abstractmethod
    def num_nodes(self) -> int:
        """Returns the number of machines."""

    @classmethod
    def check_nodes(cls, need: ExecutorNeed, options: Any, num_nodes: int) -> list[str]:
        """Returns why the ranks cannot be spread over so many machines."""
        graphs = wanted_sizes(need, options.cuda_graphs)
        reasons = reasons_against_spread(need, num_nodes)
        if need.device_type == "cuda":
            return reasons + against_sizes(need, graphs)
        if isinstance(graphs, tuple):
            reasons.append(f"executor.cuda_graphs are for GPUs, and the device is {need.device_type}: leave them out")
        return reasons

    @classmethod
    def expect_on(cls, need: ExecutorNeed, nodes: Sequence[str]) -> ExpectedWorkers:
        """Returns where the ranks will be, on machines that are described in words, in the order in which they get
        ranks."""
        layout, devices = _spread(need, len(nodes))
        return ExpectedWorkers(layout=layout, devices=tuple(devices), nodes=tuple(nodes), transport="TCP")

    def start(self) -> None:
        """Waits for the nodes, compares what is on them with what is here, and starts the ranks. Raises `PluginError`
        that names each node where something differs, before a weight is read."""
        if self._hub is not None:
            raise RuntimeError("start() was called twice")
        self._hub = self.open()
        weakref.finalize(self, self._hub.close)
        try:
            super().start()
        except BaseException:
            self._hub.close()
            raise

    def shutdown(self) -> None:
        """Stops the workers, and lets the nodes go."""
        super().shutdown()
        if self._hub is not None:
            self._hub.close()

    def placements(self, scratch: Path) -> list[Placement]:
        """Whole tensor-parallel groups on one node each, where there are at most as many nodes as groups."""
        assert self._hub is not None
        self._nodes = self._hub.wait(self.options.join_timeout_s)
        inspections = self._compare()
        self._machines = [inspection.machine for inspection in inspections]
        layout, devices = _spread(self.need, len(self._nodes))
        host = self._nodes[0].address
        host = f"[{host}]" if ":" in host else host
        init_method = f"tcp://{host}:{inspections[0].free_port}" if layout.num_ranks > 1 else None
        placements = layout.placements(devices, init_method=init_method)
        return [replace(placement, runtime=self._runtime()) for placement in placements]

    def launch(self, placement: Placement, environment: Mapping[str, str], scratch: Path) -> NodeProcess:
        """Has the node's agent start the rank."""
        assert self._hub is not None
        # Nodes may be parts of one machine.
        machines = [self._machines[node] for node in placement.layout.nodes]
        num_ranks_here = machines.count(machines[placement.rank])
        node = self._nodes[placement.node]
        return node.start(placement.rank, environment, num_ranks_here, self._hub.connection_of)

    def environment_variables(self) -> dict[str, str]:
        """Those that travel, and the threads of the config."""
        return variables_for_nodes(os.environ, self.options.environment) | super().environment_variables()

    def _runtime(self) -> Runtime | None:
        if self.need.device_type != "cuda":
            return None
        from dovetail.executors.gpu.cuda import CudaDevice

        return Runtime(CudaDevice, wanted_sizes(self.need, self.options.cuda_graphs))

    def _compare(self) -> list[Inspection]:
        spec = self.spec if isinstance(self.spec, ComparesMachines) else None
        question = Inspect(None if spec is None else pickle.dumps(self.spec), self.need.device_type)
        pool = ThreadPoolExecutor(len(self._nodes), thread_name_prefix="dovetail-inspect")
        try:
            asked = [pool.submit(self._ask, node, question) for node in self._nodes]
            mine = None if spec is None else spec.machine_facts()
            for one in wait(asked, return_when=FIRST_EXCEPTION).done:
                one.result()
        finally:
            pool.shutdown(wait=False)  # where one failed, the hub is closed, which ends the others
        inspections, clocks = zip(*(one.result() for one in asked), strict=True)
        problems = []
        per_node = ranks_of_nodes(self.need, len(self._nodes))
        for index, (node, found) in enumerate(zip(self._nodes, inspections, strict=True)):
            reasons = _other_versions(node.versions)
            if found.problem:
                reasons.append(f"what it has could not be found out: {found.problem}")
            elif spec is not None:
                reasons += spec.differences(mine, found.facts)
            wanted = per_node.count(index)
            if found.num_devices is not None and found.num_devices < wanted:
                reasons.append(
                    f"{wanted} GPUs are needed there, and torch sees {found.num_devices}: name nodes that have them, or"
                    " set device to cpu"
                )
            problems += [f"node {node.name} ({node.address}): {reason}" for reason in reasons]
            self._compare_clock(node, found.clock_s, *clocks[index])
        if problems:
            raise PluginError("\n".join(["nodes do not fit this engine, and no weight was read:", *problems]))
        self._check_addresses()
        return list(inspections)

    def _ask(self, node: NodeLink, question: Inspect) -> tuple[Inspection, tuple[float, float]]:
        """What is on a node, and the times before and after it said so."""
        before = time.time()
        found = node.inspect(question, self.options.start_timeout_s)
        return found, (before, time.time())

    def _compare_clock(self, node: NodeLink, theirs: float, before: float, after: float) -> None:
        apart = max(before - theirs, theirs - after, 0.0)
        if apart > self.options.max_clock_difference_s:
            _log.warning(
                "the clock of node %s differs by %.1f s: time stamps in its logs do too; nothing else depends on it",
                node.name,
                apart,
            )

    def _check_addresses(self) -> None:
        loopback = [node for node in self._nodes if _is_loopback(node.address)]
        if loopback and len(loopback) < len(self._nodes):
            raise PluginError(
                f"node {loopback[0].name} joined by {loopback[0].address}, by which the other nodes do not reach it:"
                " join by an address of the network, or give --address"
            )


def _spread(need: ExecutorNeed, num_nodes: int) -> tuple[WorkerLayout, list[str]]:
    """The layout, and the device of each rank on its node."""
    nodes = ranks_of_nodes(need, num_nodes)
    layout = WorkerLayout(tensor_parallel=need.tensor_parallel, num_stages=need.pipeline_parallel, nodes=nodes)
    is_cuda = need.device_type == "cuda"
    indices = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return layout, [f"cuda:{index}" if is_cuda else need.device_type for index in indices]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _other_versions(theirs: Mapping[str, str]) -> list[str]:
    """What differs, packages among it that one side lacks. Of Python the third number may."""
    python = ".".join(map(str, sys.version_info[:2]))
    pairs = {"python": (theirs["python"].rpartition(".")[0], python)} if "python" in theirs else {}
    pairs |= {name: (theirs.get(name, ""), _installed(name)) for name in COMPARED_PACKAGES}
    return [
        f"{name} {there or 'none'} is there, and {here or 'none'} here: install the same version"
        for name, (there, here) in pairs.items()
        if there != here
    ]


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
