"""Prometheus' text format. prometheus_client has a writer of it too, which takes some thirty times as long, and whoever
renders holds the interpreter's lock. Here the text of a series is made once; only numbers are new."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from prometheus_client.utils import floatToGoString

from dovetail.plugins.telemetry.prometheus.histogram import Histogram
from dovetail.plugins.telemetry.prometheus.names import Definition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]
"""Names and values."""


class Page:
    """The lines of one exposition."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def counter(self, name: str, help_: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """A counter; its name ends in "_total"."""
        self._family(name, "counter", help_, samples)

    def gauge(self, name: str, help_: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """A gauge."""
        self._family(name, "gauge", help_, samples)

    def histogram(self, definition: Definition, series: Iterable[tuple[Labels, Histogram]]) -> None:
        """A histogram."""
        name = definition.name
        self._head(name, "histogram", definition.help)
        for labels, histogram in series:
            counts, total = histogram.cumulative(), histogram.sum
            texts = _bucket_texts(name, labels, tuple(definition.bounds))
            self._lines += [f"{text} {count}" for text, count in zip(texts, counts, strict=True)]
            text = _label_text(labels)
            self._lines += [f"{name}_count{text} {counts[-1]}", f"{name}_sum{text} {total}"]

    def render(self) -> bytes:
        """The text."""
        return "\n".join([*self._lines, ""]).encode()

    def _family(self, name: str, kind: str, help_: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self._head(name, kind, help_)
        self._lines += [f"{name}{_label_text(labels)} {value}" for labels, value in samples]

    def _head(self, name: str, kind: str, help_: str) -> None:
        self._lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]


@lru_cache(maxsize=4096)
def _label_text(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


@lru_cache(maxsize=4096)
def _bucket_texts(name: str, labels: Labels, bounds: tuple[float, ...]) -> list[str]:
    limits = [*map(floatToGoString, bounds), "+Inf"]
    return [f"{name}_bucket{_label_text((*labels, ('le', limit)))}" for limit in limits]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
