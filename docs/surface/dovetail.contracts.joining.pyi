import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

MIN_KEY_BYTES: Final = 16
COMPARED_PACKAGES: Final = ('dovetail', 'torch', 'transformers', 'numpy')

@dataclass(frozen=True, kw_only=True)
class JoinedNode:
    name: str
    address: str
    driver: tuple[str, int]
    key: bytes = field(repr=False)


class ComparesMachines(ABC):
    @abstractmethod
    def machine_facts(self) -> Any: ...
    @abstractmethod
    def differences(self, mine: Any, theirs: Any) -> Sequence[str]: ...

def read_key(path: Path) -> bytes: ...
def write_key(path: Path) -> None: ...
def parse_address(text: str) -> tuple[str, int]: ...
def dial(address: tuple[str, int], key: bytes, *, patience_s: float) -> Connection: ...
def set_patience(connection: Connection, seconds: float) -> None: ...
def keep_alive(end: socket.socket, timeout_s: float) -> None: ...
