from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512

@dataclass(frozen=True)
class TracedRequest:
    arrival: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()

def parse_rate(text: str, option: str = '--rate') -> float: ...
def draw_arrivals(
    count: int,
    rate: float,
    burstiness: float = 1.0,
    seed: int = 0,
    *,
    burst_size: int = 1,
) -> list[float]: ...
def check_burstiness(burstiness: float) -> None: ...
def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    speed: float = 1.0,
    option: str = '--trace',
    in_order: bool = False,
) -> list[TracedRequest]: ...
