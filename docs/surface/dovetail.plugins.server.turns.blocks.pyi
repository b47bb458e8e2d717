from collections.abc import Iterable
from dataclasses import dataclass, field
from dovetail.contracts.dialect import Ending, Event
from typing import Literal

Kind = Literal['text', 'reasoning', 'call']

@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    name: str = ''
    call_id: str = ''
    ending: Ending = 'complete'
    parts: list[str] = field(default_factory=list)
    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class BlockBegin:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockDelta:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    block: Block

BlockEvent = BlockBegin | BlockDelta | BlockEnd

class Blocks:
    def __init__(self) -> None: ...
    blocks: list[Block]
    def add(self, events: Iterable[Event]) -> list[BlockEvent]: ...
    def finish(self, finish_reason: str) -> list[BlockEvent]: ...
