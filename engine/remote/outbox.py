"""Updates on their way to one client. What the client does not take is merged, so that a client that reads slowly, or
not at all, costs no more memory than the tokens of its requests."""

from __future__ import annotations

import zmq

from dovetail.engine.remote.messages import Accepted, CacheChanges, Refused, Update, encode
from dovetail.engine.step_update import StepUpdate

_HIGH_WATER = 64
"""Messages that the socket holds before they are merged here."""


class Outbox:
    """One client's PUSH socket. Used by one thread at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str):
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, _HIGH_WATER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._waiting: list[Accepted | Refused | CacheChanges] = []
        self._merged: StepUpdate | None = None
        self._kv_usage = 0.0
        """Of the last update."""

    def monitor(self) -> zmq.Socket[bytes]:
        """A socket, for any one thread, that reports when the connection to the client is lost."""
        return self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    @property
    def is_behind(self) -> bool:
        """Whether something waits until the client takes more."""
        return bool(self._waiting) or self._merged is not None

    def send(self, message: Accepted | Refused | Update | CacheChanges) -> None:
        """Sends, or keeps the message until `flush`. Does not wait."""
        if not self.is_behind and self._try(encode(message)):
            return
        if not isinstance(message, Update):
            # The updates that wait know nothing of this request yet, so it may go in front of them.
            self._waiting.append(message)
            return
        self._kv_usage = message.kv_usage
        self._merged = message.update if self._merged is None else merged(self._merged, message.update)

    def flush(self) -> None:
        """Sends what waits, as far as the client takes it."""
        while self._waiting and self._try(encode(self._waiting[0])):
            del self._waiting[0]
        if not self._waiting and self._merged is not None and self._try(encode(Update(self._merged, self._kv_usage))):
            self._merged = None

    def close(self) -> None:
        """Drops what waits."""
        self._socket.disable_monitor()
        self._socket.close()

    def _try(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True


def merged(older: StepUpdate, newer: StepUpdate) -> StepUpdate:
    """Two consecutive updates as one. Takes over the newer one."""
    tokens: dict[int, list[int]] = {}
    for update in (older, newer):
        start = 0
        for index, seq_id in enumerate(update.seq_ids):
            count = 1 if update.counts is None else update.counts[index]
            tokens.setdefault(seq_id, []).extend(update.token_ids[start : start + count])
            start += count
    spans = {seq_id: found[:] for seq_id, found in older.accepted_spans.items()}
    for seq_id, new_spans in newer.accepted_spans.items():
        spans.setdefault(seq_id, []).extend(new_spans)
    logprobs = {seq_id: entries[:] for seq_id, entries in older.logprobs.items()}
    for seq_id, entries in newer.logprobs.items():
        logprobs.setdefault(seq_id, []).extend(entries)
    prompt_logprobs = dict(older.prompt_logprobs)
    for request_id, (position, entries) in newer.prompt_logprobs.items():
        start_, known = prompt_logprobs.get(request_id, (position, []))
        # A prompt that starts over after a preemption brings positions that are known.
        prompt_logprobs[request_id] = start_, [*known, *entries[start_ + len(known) - position :]]
    return StepUpdate(
        seq_ids=list(tokens),
        token_ids=[token for each in tokens.values() for token in each],
        counts=[len(each) for each in tokens.values()],
        ends=[*older.ends, *newer.ends],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        accepted_spans=spans,
        metrics={**older.metrics, **newer.metrics},
    )
