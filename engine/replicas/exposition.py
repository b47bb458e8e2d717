"""The metrics of several replicas as one page: each sample gets the label `engine`, as vLLM calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dovetail.contracts.errors import PluginError
from dovetail.contracts.telemetry import Exposition

_HEAD = re.compile(r"# (?:HELP|TYPE|UNIT) (\S+)")
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?( .*)", re.DOTALL)
_ENGINE = re.compile(r'(?<![a-zA-Z0-9_])engine="[^"]*"')
_END = "# EOF"
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
"""Of a page that no replica wrote a part of."""
_REASON_LENGTH = 200


def labelled(pages: Mapping[int, Exposition], troubles: Mapping[int, str]) -> Exposition:
    """One page of all, by replica. `troubles`: why a replica takes no requests, empty where it does; of all of
    them, those too that have no page. Raises `PluginError` for pages of different formats."""
    content_types = {page.content_type for page in pages.values()}
    if len(content_types) > 1:
        raise PluginError(
            f"the replicas expose metrics in different formats ({', '.join(sorted(content_types))}), which make no page"
            " together: give all of them the same telemetry sinks"
        )
    heads: dict[str, dict[str, None]] = {}
    samples: dict[str, list[str]] = {}
    has_end = False
    for index, page in pages.items():
        family = ""
        for line in page.body.decode().splitlines():
            if head := _HEAD.match(line):
                family = head[1]
                heads.setdefault(family, {})[line] = None
            elif line == _END:
                has_end = True
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_with_label(line, index))
    for name, (about, states) in _states(troubles).items():
        heads[name], samples[name] = dict.fromkeys(about), states
    lines = [line for family in {**heads, **samples} for line in (*heads.get(family, ()), *samples.get(family, ()))]
    content_type = content_types.pop() if content_types else _PLAIN
    return Exposition(content_type=content_type, body="\n".join([*lines, *[_END] * has_end, ""]).encode())


def _states(troubles: Mapping[int, str]) -> dict[str, tuple[list[str], list[str]]]:
    """By family: heads and samples that say which replicas take requests. Each replica has a sample, so that one that
    is down is seen as such and not as gone."""
    up, reason = "dovetail:replica_up", "dovetail:replica_down_reason"
    ups = [f'{up}{{engine="{index}"}} {int(not trouble)}' for index, trouble in troubles.items()]
    reasons = [
        f'{reason}{{engine="{index}",reason="{_escaped(trouble[:_REASON_LENGTH])}"}} 1'
        for index, trouble in troubles.items()
        if trouble
    ]
    found = {up: ([f"# HELP {up} 1 while the replica takes requests.", f"# TYPE {up} gauge"], ups)}
    if reasons:
        found[reason] = ([f"# HELP {reason} Why a replica takes no requests.", f"# TYPE {reason} gauge"], reasons)
    return found


def _escaped(text: str) -> str:
    """As the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _with_label(line: str, index: int) -> str:
    sample = _SAMPLE.fullmatch(line)
    if sample is None:
        return line
    name, labels, rest = sample.groups()
    labels, num_found = _ENGINE.subn(f'engine="{index}"', labels or "")
    if not num_found:
        labels = ",".join(filter(None, (f'engine="{index}"', labels)))
    return f"{name}{{{labels}}}{rest}"
