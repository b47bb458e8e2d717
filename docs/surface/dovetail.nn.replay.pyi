import ctypes, logging, torch
from collections.abc import Callable, Sequence
from dovetail.nn import native
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name('replay.c')
MAX_ROWS = 64
logger = logging.getLogger(__name__)
Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Calls = Sequence[tuple[native.Kernel, ctypes.Structure]]

class Replay:
    def __init__(
        self,
        calls: Calls,
        reserved: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        output: Any,
    ): ...
    inputs: Sequence[torch.Tensor]
    def forget(self) -> None: ...
    def run(self) -> torch.Tensor: ...

def record(
    forward: Forward,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, Replay | str]: ...

class ReplayedForward:
    def __init__(self, forward: Forward): ...
    refusal: str | None
    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...
