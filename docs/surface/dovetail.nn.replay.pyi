import ctypes, torch
from collections.abc import Callable, Sequence
from dovetail.nn import native
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name('replay.c')
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
    inputs: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, Replay | str]: ...
