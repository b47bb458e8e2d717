"""An engine's workers, asked through its executor: what comes back is compared with what the config asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import Executor, WorkerReport
from dovetail.registry.calls import calling


@dataclass(frozen=True)
class WorkerReports:
    """What the workers of one engine hold."""

    by_rank: tuple[WorkerReport, ...]
    answering: WorkerReport
    """Of the rank that samples and drafts."""

    @property
    def of_stages(self) -> tuple[WorkerReport, ...]:
        """Of one rank of each pipeline stage, in the order of the stages."""
        layout = self.answering.placement.layout
        return tuple(self.by_rank[layout.ranks_of_stage(stage)[0]] for stage in range(layout.num_stages))


class Workers:
    """Calls the workers between steps. Raises `PluginError` where the executor does not have the workers that the
    config asks for: it would generate, and with other weights than it should."""

    def __init__(self, executor: Executor, config: ResolvedConfig):
        self._executor = executor
        self._name = config.executor.name
        self._layout = config.tensor_parallel, config.num_stages
        self._num_ranks = config.num_ranks

    def call(self, method: str, *args: Any) -> list[Any]:
        """One answer per rank, in rank order."""
        answers = self._executor.call(method, *args)
        if len(answers) != self._num_ranks:
            raise PluginError(
                f"executor {self._name!r} has {_workers(len(answers))} (as many answered {method!r}), but"
                f" {self._asked()} for {_workers(self._num_ranks)}: choose another executor.name, or change what is"
                " asked"
            )
        return answers

    def check_alive(self) -> None:
        """Raises `WorkerError` where a worker has ended, as far as the executor knows without asking one."""
        with calling(f"executor {self._name!r}", "rank_status"):
            all_live = all(status.is_alive for status in self._executor.rank_status())
        if not all_live:
            self.call("plugin_hash")

    def describe(self) -> WorkerReports:
        """The reports of all ranks, each of which is where it should be."""
        reports: list[WorkerReport] = self.call("describe")
        layout = reports[0].placement.layout
        if (layout.tensor_parallel, layout.num_stages) != self._layout:
            raise self._misplaced(
                f"lays out {layout.num_stages} stages of {_workers(layout.tensor_parallel)}, and"
                f" {self._layout[1]} stages of {_workers(self._layout[0])} were asked for"
            )
        for rank, report in enumerate(reports):
            placement = report.placement
            if placement.rank != rank or placement.layout != layout:
                raise self._misplaced(
                    f"returns as answer {rank} that of a worker at rank {placement.rank} of {placement.layout}"
                )
        return WorkerReports(tuple(reports), reports[layout.answering_rank])

    def _asked(self) -> str:
        tensor_parallel, num_stages = self._layout
        stages = f" and executor.pipeline_parallel {num_stages} ask" if num_stages > 1 else " asks"
        return f"executor.tensor_parallel {tensor_parallel}{stages}"

    def _misplaced(self, what: str) -> PluginError:
        return PluginError(
            f"executor {self._name!r} breaks the executor's contract: it {what}; choose another executor.name"
        )


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"
