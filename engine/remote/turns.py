"""Reads what an engine sends, in turns, so that others on the same event loop are served meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

_LONGEST_TURN_S = 0.002
"""After so long, reading what the engine sent pauses, so that streams are written and others are served."""
_TURNS_OF_OTHERS = 4
"""Of the event loop, in such a pause."""


async def read_in_turns(socket: zmq.asyncio.Socket, take: Callable[[bytes], None]) -> None:
    """Hands every message of `socket` to `take`, which raises nothing, until it is cancelled."""
    while True:
        is_drained = await _read_turn(socket, await socket.recv(), take)
        # An engine may be as fast as this loop, and what else runs here would wait for a gap. A probe takes some
        # turns of the loop from its connection to its answer: with one at a time it would wait for as many reads.
        for _ in range(0 if is_drained else _TURNS_OF_OTHERS):
            await asyncio.sleep(0)


async def _read_turn(socket: zmq.asyncio.Socket, data: bytes, take: Callable[[bytes], None]) -> bool:
    """Reads what there is, up to `_LONGEST_TURN_S`; whether that was all."""
    ends = time.monotonic() + _LONGEST_TURN_S
    while True:
        take(data)
        if time.monotonic() > ends:
            return False
        try:
            data = await socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return True
