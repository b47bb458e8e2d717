"""Which machine each rank runs on."""

from __future__ import annotations

from dovetail.contracts.executor import ExecutorNeed


def reasons_against_spread(need: ExecutorNeed, num_nodes: int) -> list[str]:
    """Returns why the ranks cannot be spread evenly over the nodes: a node has whole stages, the same number of each,
    or equal parts of one stage."""
    stages, ranks = need.pipeline_parallel, need.tensor_parallel
    if _fits(stages, ranks, num_nodes):
        return []
    fitting = [str(count) for count in range(1, stages * ranks + 1) if _fits(stages, ranks, count)]
    return [
        f"{num_nodes} nodes cannot share pipeline_parallel {stages} x tensor_parallel {ranks}: a node has whole stages,"
        f" or all have equal parts of one; set executor.nodes to {' or '.join(fitting)}"
    ]


def _fits(stages: int, ranks: int, num_nodes: int) -> bool:
    if num_nodes <= stages:
        return True  # whole stages; some nodes may have one more
    return num_nodes % stages == 0 and ranks % (num_nodes // stages) == 0


def ranks_of_nodes(need: ExecutorNeed, num_nodes: int) -> tuple[int, ...]:
    """Returns the node of each rank, in the order of ranks. Two stages with four ranks each on three nodes would be
    refused; on two nodes each has a stage, on four each has half of one::

        0 0 0 0 1 1 1 1        0 0 1 1 2 2 3 3
    """
    stages, ranks = need.pipeline_parallel, need.tensor_parallel
    if num_nodes <= stages:
        return tuple(stage * num_nodes // stages for stage in range(stages) for _ in range(ranks))
    per_node = stages * ranks // num_nodes
    return tuple(position // per_node for position in range(stages * ranks))
