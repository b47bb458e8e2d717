"""The option `cuda_graphs` of executors whose workers capture graphs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from dovetail.contracts.executor import ExecutorNeed

Sizes = Literal["auto", "off"] | tuple[int, ...]


def _read(value: Any) -> Any:
    if value is False:  # what YAML makes of off
        return "off"
    return tuple(value) if isinstance(value, list) else value


def _checked(value: Sizes) -> Sizes:
    if isinstance(value, tuple) and any(size < 1 for size in value):
        raise ValueError(f"{min(value)} is no number of requests: sizes start at 1; off captures nothing")
    return value


GraphSizes = Annotated[Sizes, BeforeValidator(_read), AfterValidator(_checked)]
"""Batch sizes, in requests, for which decode and verify steps are captured; "auto": a ladder of sizes; "off": none."""


def wanted_sizes(need: ExecutorNeed, sizes: Sizes) -> Sizes:
    """The option, unless the config asks for eager steps."""
    return "off" if need.enforce_eager or sizes == () else sizes


def against_sizes(need: ExecutorNeed, sizes: Sizes) -> list[str]:
    """Returns the reason against sizes that are named: a graph that no step fills. None for "auto" and "off"."""
    sizes, most = wanted_sizes(need, sizes), need.max_num_seqs
    if not isinstance(sizes, tuple) or most is None or max(sizes) <= most:
        return []
    return [
        f"executor.cuda_graphs {list(sizes)}: a graph of {max(sizes)} requests is never used, since "
        f"scheduler.max_num_seqs is {most}: leave out what is larger, or raise scheduler.max_num_seqs"
    ]
