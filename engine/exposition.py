"""What several telemetry sinks expose, as one page."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dovetail.contracts.errors import PluginError
from dovetail.contracts.telemetry import Exposition

_FAMILY = re.compile(rb"^# TYPE (\S+)", re.MULTILINE)
_VERSION = re.compile(r"version=([^;\s]+)")
_END = b"# EOF\n"
"""Of a page in OpenMetrics' format, which has one."""


def joined(expositions: Mapping[str, Exposition]) -> Exposition:
    """One page of at least one, which are given by sink. Raises `PluginError` where formats differ, or two sinks have
    metrics of one name: Prometheus would read no such page."""
    (first, page), *others = expositions.items()
    if not others:
        return page
    owners = dict.fromkeys(_FAMILY.findall(page.body), first)
    bodies = [page.body]
    for sink, other in others:
        if _format(other) != _format(page):
            raise PluginError(
                f"telemetry sinks {first} and {sink} expose metrics in formats that make no page together,"
                f" {page.content_type!r} and {other.content_type!r}: have them write one format, or leave one out"
            )
        for family in _FAMILY.findall(other.body):
            owner = owners.setdefault(family, sink)
            if owner != sink:
                raise PluginError(
                    f"telemetry sinks {owner} and {sink} both expose the metric {family.decode()}: rename it in one,"
                    " or leave one out"
                )
        bodies.append(other.body)
    end = _END if page.body.endswith(_END) else b""
    body = b"".join(_closed(body.removesuffix(_END)) for body in bodies) + end
    return Exposition(content_type=page.content_type, body=body)


def _format(page: Exposition) -> tuple[str, str]:
    """Its media type and the version of it; character sets are all UTF-8."""
    version = _VERSION.search(page.content_type)
    return page.content_type.partition(";")[0].strip(), version[1] if version is not None else ""


def _closed(body: bytes) -> bytes:
    return body if body.endswith(b"\n") or not body else body + b"\n"
