"""StatsD's lines (`name:value|type`), DogStatsD's tags, and how lines share datagrams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

Format = Literal["statsd", "dogstatsd"]
Kind = Literal["c", "g", "ms"]
Tags = tuple[tuple[str, str], ...]

_RESERVED = re.compile(r"[:|@#,\s]")


class Lines:
    """Writes lines of one format. Labels of plain StatsD become part of the name, since it has no tags."""

    def __init__(self, format: Format, prefix: str, tags: Mapping[str, str]):
        self._has_tags = format == "dogstatsd"
        self._prefix = f"{prefix}." if prefix else ""
        self._tags: Tags = tuple(tags.items())

    def line(self, name: str, value: float, kind: Kind, labels: Tags = (), tags: Tags = ()) -> str:
        """`labels` distinguish series in both formats, `tags` where the format has them."""
        number = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        if not self._has_tags:
            name = ".".join((name, *(_clean(value).replace(".", "_") for _, value in labels)))
            return f"{self._prefix}{name}:{number}|{kind}"
        given = ",".join(f"{_clean(key)}:{_clean(value)}" for key, value in (*self._tags, *labels, *tags))
        return f"{self._prefix}{name}:{number}|{kind}" + (f"|#{given}" if given else "")


def _clean(text: str) -> str:
    """Without the characters that end a name, a value or a tag."""
    return _RESERVED.sub("_", text)


def datagrams(lines: Iterable[str], most: int) -> Iterator[bytes]:
    """Joins lines, as many as fit in `most` bytes; a longer line goes alone."""
    packet = b""
    for line in lines:
        encoded = line.encode()
        if packet and len(packet) + 1 + len(encoded) > most:
            yield packet
            packet = b""
        packet = packet + b"\n" + encoded if packet else encoded
    if packet:
        yield packet
