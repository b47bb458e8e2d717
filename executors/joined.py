"""The `joined` executor: workers on machines that join by `python -m dovetail.worker --join HOST:PORT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from dovetail.contracts.errors import ConfigError, PluginError
from dovetail.contracts.executor import ExecutorNeed, ExpectedWorkers
from dovetail.contracts.joining import parse_address, read_key
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.executors.nodes.base import NodesExecutor, NodesOptions
from dovetail.executors.nodes.hub import Hub


def _checked(text: str) -> str:
    parse_address(text)
    return text


class JoinedOptions(NodesOptions):
    """Options of `joined`."""

    listen: Annotated[str, AfterValidator(_checked)] = "0.0.0.0:29400"
    """HOST:PORT at which machines join."""
    key_file: Path | None = None
    """File with the key that every machine has too. Needed: there is no default."""
    nodes: Annotated[int, Field(ge=1)] | list[str] = 1
    """How many machines to wait for, or their names, in the order in which they get ranks."""


class JoinedExecutor(NodesExecutor):
    """Waits for machines that join, and runs a process per rank on them. A machine that joins when enough have is
    refused, and tries again: a spare."""

    contract: ClassVar[tuple[int, int]] = (1, 9)
    Options: ClassVar[type[PluginOptions]] = JoinedOptions
    options: JoinedOptions

    @classmethod
    def check(cls, need: ExecutorNeed, options: Any, environment: Environment) -> list[str]:
        """Refuses a config without a key, several replicas, and machines over which the ranks cannot be spread."""
        reasons = []
        if need.num_replicas > 1:
            reasons.append(
                f"server.data_parallel_size is {need.num_replicas}, and all replicas would listen at"
                f" {options.listen}: leave it at 1, and start a server per engine, each with an executor.listen of its"
                " own"
            )
        if options.key_file is None:
            reasons.append(
                "executor.key_file is not set: make a key with python -m dovetail.worker --new-key PATH, and copy it to"
                " every node"
            )
        else:
            try:
                read_key(options.key_file)
            except ConfigError as error:
                reasons.append(str(error))
        if isinstance(options.nodes, list):
            twice = sorted({name for name in options.nodes if options.nodes.count(name) > 1})
            if twice or not options.nodes:
                reasons.append(f"executor.nodes names {f'{twice[0]} twice' if twice else 'no node'}")
        return reasons + cls.check_nodes(need, options, _count(options))

    @classmethod
    def expected_workers(cls, need: ExecutorNeed, options: JoinedOptions) -> ExpectedWorkers:
        """On the nodes that the config names, else on those that join, in their order."""
        if isinstance(options.nodes, list):
            return cls.expect_on(need, [f"node {name}" for name in options.nodes])
        count = options.nodes
        return cls.expect_on(need, [f"a node that joins ({index} of {count})" for index in range(1, count + 1)])

    def num_nodes(self) -> int:
        """The option `nodes`."""
        return _count(self.options)

    def open(self) -> Hub:
        """Listens at the option `listen`."""
        options = self.options
        if options.key_file is None:
            raise ConfigError("executor.key_file is not set")
        names = options.nodes if isinstance(options.nodes, list) else None
        key = read_key(options.key_file)
        address = parse_address(options.listen)
        advice = f"Run on each node: python -m dovetail.worker --join {_dialled(address[0])}:{{port}} --key-file PATH"
        try:
            return Hub(address, key, options.node_timeout_s, self.num_nodes(), names, advice)
        except PluginError as error:
            raise PluginError(f"executor.listen: {error}") from error


def _dialled(host: str) -> str:
    """What machines dial where the engine listens at this host."""
    if host in ("0.0.0.0", "::"):
        return "HOST"
    return f"[{host}]" if ":" in host else host


def _count(options: JoinedOptions) -> int:
    return options.nodes if isinstance(options.nodes, int) else len(options.nodes)
