"""The sockets of one client of an engine, and whether there is an engine at the other end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dovetail.contracts.errors import WorkerError
from dovetail.engine.remote.messages import Hello, Message, encode
from dovetail.engine.remote.turns import read_in_turns

_LAST_TURNS = 100
"""Of the event loop, for what an engine said before it ended."""
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class EngineListener(Protocol):
    """Hears of the engines at an address, in the client's event loop. It must return at once."""

    def engine_came(self) -> None:
        """An engine answers: another one, or the first."""

    def engine_lost(self) -> None:
        """It ended. What waited for it has failed."""

    def engine_updated(self) -> None:
        """Its weights are others than before; or it has come, and they are others than those that it started with."""

    def engine_silent(self, error: WorkerError | None) -> None:
        """It is there and does not answer, again each time that it is asked; None: it answers again."""


class Connection:
    """From one event loop to the engines that serve at an address, one after another."""

    def __init__(self, address: str):
        """Nothing is sent before `open`."""
        self.address = address
        self.client_name = uuid.uuid4().hex[:12]
        self.num_events = 0
        """Times that the connection to an engine came or went."""
        self.up, self.down = asyncio.Event(), asyncio.Event()
        """Set while there is an engine, and while there is none."""
        self.down.set()
        self.settled = asyncio.Event()
        """Set once an engine answered, or nothing listened at the address."""
        self._last_end: str | None = None
        """Why the last engine ended, where it said so."""
        self._context = zmq.asyncio.Context()
        self._to_engine = self._context.socket(zmq.DEALER)
        self._to_engine.set(zmq.LINGER, 0)
        self._to_engine.set(zmq.SNDHWM, 0)
        self._updates = self._context.socket(zmq.PULL)
        # In the engine's directory: whoever made that one removes it.
        self._my_address = f"{address.rpartition('/')[0]}/client-{self.client_name}"
        self._outgoing: list[bytes] = []
        """Messages that wait for the end of this turn of the loop."""
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, take_update: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Greets each engine that appears at the address. `lost`: it is gone."""
        monitor = self._to_engine.get_monitor_socket(_EVENTS)
        self._updates.bind(self._my_address)
        self._to_engine.connect(self.address)
        self._tasks = [
            asyncio.create_task(self._watch(monitor, lost)),
            asyncio.create_task(read_in_turns(self._updates, take_update)),
        ]

    async def reply(self) -> bytes:
        """The next message of the engine's ROUTER socket."""
        data: bytes = await self._to_engine.recv()
        return data

    def send(self, message: Message) -> None:
        """Together with what else this turn of the loop sends: each send wakes a thread of ZeroMQ."""
        data = encode(message)
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(data)

    def note_up(self) -> None:
        """The engine answered the greeting."""
        self.down.clear()
        self.up.set()
        self.settled.set()

    def note_end(self, reason: str) -> None:
        """The engine said why it ends."""
        self._last_end = reason

    def check_up(self) -> None:
        """Raises `WorkerError` where no engine is there."""
        if not self.up.is_set():
            why = "" if self._last_end is None else f"; the last one ended: {self._last_end}"
            raise WorkerError(f"no engine is running: this client waits for the next one at its address{why}")

    def loss(self) -> WorkerError:
        """What becomes of requests that were under way when the engine ended."""
        why = "" if self._last_end is None else f": {self._last_end}"
        return WorkerError(f"the engine's process ended while the request was under way{why}")

    async def stop_reading(self) -> None:
        """Ends the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Closes the sockets; the engine aborts this client's requests."""
        self._context.destroy(linger=0)
        Path(self._my_address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _flush(self) -> None:
        # The socket has no high-water mark, so this does not wait.
        if self._outgoing and not self._to_engine.closed:
            self._to_engine.send_multipart(self._outgoing, zmq.NOBLOCK)
        self._outgoing = []

    async def _watch(self, monitor: zmq.asyncio.Socket, lost: Callable[[], None]) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_CONNECT_RETRIED:
                self.settled.set()
                continue
            self.num_events += 1
            if event == zmq.EVENT_CONNECTED:
                self._last_end = None
                self.send(Hello(self._my_address))
            else:
                await self._let_replies_be_read()
                self.up.clear()
                self.down.set()
                lost()

    async def _let_replies_be_read(self) -> None:
        """What the engine said last is here already, and another task reads it; but that one may be at work."""
        for _ in range(_LAST_TURNS):
            if not int(self._to_engine.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            await asyncio.sleep(0)
