"""Numbers for people."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    """In the largest binary unit that leaves at least 1: "512 KiB", "1.5 GiB"."""
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}" if value < 10 else f"{value:.0f} {units[0]}"


def gibibytes(num_bytes: int) -> str:
    """As in "1.25 GiB"."""
    return f"{num_bytes / 2**30:.2f} GiB"


def mebibytes(num_bytes: float) -> str:
    """As in "98.5 MiB"."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def percent(fraction: float) -> str:
    """As in "37%"."""
    return f"{100 * fraction:.0f}%"


def rate(value: float) -> str:
    """Three digits: "0.52", "4.1", "230", "12,400"."""
    digits = 2 if value < 1 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def numbers(values: tuple[int, ...]) -> str:
    """Runs of numbers in short: (0, 1, 2, 5) -> "0-2,5"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
