"""Events of a completion as blocks, one after the other: a stretch of text, of reasoning, or one call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from dovetail.contracts.dialect import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Ending,
    Event,
    ReasoningDelta,
    TextDelta,
)

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """A block, as far as it is known."""

    index: int
    kind: Kind
    name: str = ""
    """Of a call."""
    call_id: str = ""
    ending: Ending = "complete"
    """Of a call; a block is complete where the output goes on behind it, or ends by itself."""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text, reasoning, or the arguments of a call."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class BlockBegin:
    """A block begins."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """More of a block."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """A block is over."""

    block: Block


BlockEvent = BlockBegin | BlockDelta | BlockEnd


class Blocks:
    """The blocks of one completion."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def add(self, events: Iterable[Event]) -> list[BlockEvent]:
        """What is new."""
        found: list[BlockEvent] = []
        for event in events:
            match event:
                case TextDelta(text):
                    self._show(found, "text", text)
                case ReasoningDelta(text):
                    self._show(found, "reasoning", text)
                case CallBegin(_, name, call_id):
                    self._begin(found, Block(len(self.blocks), "call", name, call_id))
                case ArgumentsDelta(_, text):
                    self._show(found, "call", text)
                case CallEnd(_, ending):
                    self._close(found, ending)
        return found

    def finish(self, finish_reason: str) -> list[BlockEvent]:
        """The output is over: the end of the block that is open."""
        found: list[BlockEvent] = []
        self._close(found, "truncated" if finish_reason == "length" else "complete")
        return found

    def _show(self, found: list[BlockEvent], kind: Kind, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(found, Block(len(self.blocks), kind))
        assert self._open is not None
        self._open.parts.append(text)
        found.append(BlockDelta(self._open, text))

    def _begin(self, found: list[BlockEvent], block: Block) -> None:
        self._close(found, "complete")
        self.blocks.append(block)
        self._open = block
        found.append(BlockBegin(block))

    def _close(self, found: list[BlockEvent], ending: Ending) -> None:
        if self._open is not None:
            self._open.ending = ending
            found.append(BlockEnd(self._open))
            self._open = None
