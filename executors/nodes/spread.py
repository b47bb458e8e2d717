"""Which machine each rank runs on."""

from __future__ import annotations

from dovetail.contracts.executor import ExecutorNeed


def reasons_against_spread(need: ExecutorNeed, num_nodes: int) -> list[str]:
    """Returns why the ranks cannot be spread evenly over the nodes: a node has whole stages, the same number of each,
    or equal parts of one stage."""
    stages, ranks = need.pipeline_parallel, need.tensor_parallel
    if num_nodes <= stages:
        return []  # whole stages; some nodes may have one more
    if num_nodes % stages == 0 and ranks % (num_nodes // stages) == 0:
        return []
    return [
        f"{num_nodes} nodes do not divide {stages} pipeline stages of {ranks} ranks: a node gets whole stages, or all"
        f" get equal parts of one; use at most {stages * ranks} nodes, a multiple of {stages} or fewer than that"
    ]


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
