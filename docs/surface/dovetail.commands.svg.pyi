from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Format = Callable[[float], str]
Point = tuple[float, float]

@dataclass(frozen=True)
class Series:
    label: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    ticks: Sequence[float]
    def place(self, value: float) -> float: ...

def nice_range(values: Sequence[float], *, from_zero: bool = True, count: int = 5) -> Range: ...
def cumulative(samples: Sequence[float]) -> list[Point]: ...
def curves(
    title: str,
    series: Sequence[Series],
    x: Format,
    y: Format,
    x_title: str,
    *,
    stepped: bool = False,
    legend: Literal['top', 'bottom'] = 'bottom',
) -> str: ...
def points(title: str, series: Sequence[Series], x: Format, y: Format, x_title: str) -> str: ...
def dot_rows(title: str, rows: Sequence[tuple[str, Sequence[float]]], show: Format) -> str: ...

@dataclass(frozen=True)
class Interval:
    label: str
    value: float
    ends: tuple[float, float] | None
    style: str

def intervals(title: str, rows: Sequence[Interval], show: Format, *, mark: float) -> str: ...
