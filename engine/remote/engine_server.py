"""The step loop of an engine in a process of its own: commands of clients between steps, an update to each after."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from importlib import metadata
from typing import Any

import msgspec
import zmq

from dovetail.contracts.errors import DovetailError, QueueFull, WorkerError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.weight_transport import WeightsReport, WeightUpdateConflict
from dovetail.engine.draft_blocks import drafters_in_blocks
from dovetail.engine.remote.cache_followers import CacheFollowers
from dovetail.engine.remote.io_thread import IOThread
from dovetail.engine.remote.messages import (
    Abort,
    Accepted,
    Call,
    Ended,
    EngineOrigin,
    Refused,
    Reply,
    Stop,
    Submit,
    Update,
    WeightsChanged,
    Welcome,
    encode,
    failure_of,
    processed_input,
)
from dovetail.engine.remote.outbox import Outbox
from dovetail.engine.remote.weight_history import WeightHistory
from dovetail.engine.step_update import StepUpdate
from dovetail.engine.token_engine import KEPT_REQUESTS, TokenEngine

logger = logging.getLogger(__name__)


class EngineServer:
    """Serves an engine to clients until it is stopped. `run` is the step loop, in the thread that calls it."""

    def __init__(
        self,
        engine: TokenEngine,
        address: str,
        max_num_waiting: int | None = None,
        kept_requests: int = KEPT_REQUESTS,
        unhealthy_after_s: float | None = None,
    ):
        """`address`: of the ROUTER socket, which clients connect to ("ipc:///path"). While `max_num_waiting` sequences
        wait for their first step, requests are refused with `QueueFull`. `kept_requests`: so many requests can be
        explained after their end. While a step, or what is done before it, takes longer than `unhealthy_after_s`,
        `check_health` of clients raises `WorkerError`."""
        self._engine = engine
        engine.keep_ended(kept_requests)
        self._max_num_waiting = max_num_waiting
        self._commands: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._unhealthy_after_s = unhealthy_after_s
        self._turn_began: float | None = None
        """Of the step loop, on the monotonic clock; None while it waits for work."""
        self._outboxes: dict[bytes, Outbox] = {}
        self._clients: dict[int, bytes] = {}
        """By seq_id, of sequences that have not ended."""
        self._requests: dict[bytes, set[str]] = {}
        """By client, those that are not finished."""
        self._owners: dict[str, tuple[bytes, list[int]]] = {}
        """By request id: its client and its seq_ids."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        tokenizer = engine.tokenizer.form if engine.tokenizer is not None else None
        welcome = Welcome(uuid.uuid4().hex, engine.facts, tokenizer, max_num_waiting, _origin(engine))
        self._followers = CacheFollowers(engine.kv_events, engine.facts.block_size)
        self._io = IOThread(self._context, address, welcome, self._answers(), engine.explain_request, self)
        self._reply = self._io.reply_socket()
        self._updater = b""
        """The client that began the last weight update."""
        self._history = WeightHistory(engine.weight_updates, engine.sleeping, engine.regions, self._tell_weights)
        self._calls = self._named_calls()
        self._calls_of_clients: dict[str, Callable[..., Any]] = {
            "follow_cache": self._follow_cache,
            "start_weight_update": self._start_weight_update,
            "repeat_weight_change": self._repeat_weight_change,
        }
        """Those that depend on the client that calls, which they take first."""

    def run(self) -> None:
        """Returns after `stop`. Raises `WorkerError` where a worker died; clients hear of it, as of any other error."""
        self._io.start()
        try:
            while self._wait_for_work():
                self._turn_began = time.monotonic()
                while self._commands:
                    self._commands.popleft()()
                if self._engine.is_runnable:
                    self._step()
                self._publish_cache()  # of commands, and of steps without outputs
                for outbox in self._outboxes.values():
                    if outbox.is_behind:
                        outbox.flush()
                self._turn_began = None
        except Exception as error:
            for client in self._outboxes:
                self._send(client, Ended(failure_of(error)))
            raise
        finally:
            self._close()

    def stop(self) -> None:
        """Ends `run` after the step that runs. From any thread, and from a signal handler."""
        self._is_stopping = True
        self._notify()

    # What the I/O thread hands on; each becomes a command between two steps.

    def client_came(self, client: bytes, outbox: Outbox) -> None:
        """See `Receiver`."""
        self._do(partial(self._meet, client, outbox))

    def client_said(self, client: bytes, message: Submit | Stop | Abort | Call) -> None:
        """See `Receiver`."""
        if isinstance(message, Submit):
            self._do(partial(self._submit, client, message))
        elif isinstance(message, Stop):
            self._do(partial(self._end, partial(self._engine.stop, message.stops)))
        elif isinstance(message, Abort):
            self._do(partial(self._end, partial(self._engine.abort_request, message.request_ids)))
        else:
            self._do(partial(self._call, client, message))

    def client_went(self, client: bytes) -> None:
        """See `Receiver`."""
        self._do(partial(self._drop, client))

    def _named_calls(self) -> dict[str, Callable[..., Any]]:
        """What clients may have done between two steps (`Call`)."""
        engine, history = self._engine, self._history
        return {
            "cache_statistics": engine.cache_statistics,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "sleep": engine.sleeping.sleep,
            "wake_up": history.wake_up,
            "is_sleeping": engine.is_sleeping,
            "regions": lambda: list(engine.regions.statuses),
            "hold": engine.hold,
            "resume": lambda request_ids=None: (
                engine.pausing.resume() if request_ids is None else engine.resume(request_ids)
            ),
            "pause": engine.pausing.pause,
            "is_paused": lambda: engine.pausing.is_paused,
            "start_lora": lambda request: engine.start_lora(LoRARequest(**request)),
            "remove_lora": engine.remove_lora,
            "list_loras": engine.list_loras,
            "pin_lora": engine.pin_lora,
            "unpin_lora": engine.unpin_lora,
            "init_weight_transfer_engine": engine.weight_updates.init_weight_transfer_engine,
            "update_weights": history.update_weights,
            "finish_weight_update": history.finish_weight_update,
            "abort_weight_update": engine.weight_updates.abort_weight_update,
            "weights": lambda: engine.weight_updates.report,
        }

    def _answers(self) -> dict[str, Callable[[], Any]]:
        def metrics() -> tuple[str, bytes]:
            found = self._engine.metrics()
            return found.content_type, found.body

        return {"health": self._check_health, "metrics": metrics}

    def _check_health(self) -> None:
        """In the I/O thread, which answers whatever the step loop does."""
        began, limit = self._turn_began, self._unhealthy_after_s
        if began is None or limit is None:
            return
        took = time.monotonic() - began
        if took > limit:
            raise WorkerError(
                f"one step has taken {took:.0f} seconds so far: a worker hangs, or steps are longer than"
                f" server.unhealthy_after_s ({limit:g}) allows"
            )

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._notify()

    def _notify(self) -> None:
        with self._engine.wakeup:
            self._engine.wakeup.notify_all()

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when it is time to stop."""
        is_behind = any(outbox.is_behind for outbox in self._outboxes.values())
        with self._engine.wakeup:
            has_work = self._engine.wakeup.wait_for(
                lambda: self._is_stopping or self._commands or self._engine.is_runnable,
                # A client that is behind takes more without notice.
                timeout=_FLUSH_S if is_behind else _CHECK_S,
            )
        if not has_work and not is_behind:
            self._engine.workers.check_alive()
        return not self._is_stopping

    def _step(self) -> None:
        try:
            update = self._engine.step()
        except WorkerError:
            raise
        except BaseException as error:
            # A plugin's. The engine has ended all requests and can go on; only one whose workers are gone cannot.
            logger.exception("a step failed")
            self._fail_ended(error)
        else:
            self._publish_cache()
            if update is not None:
                self._publish(update)

    def _publish_cache(self) -> None:
        self._followers.publish(self._outboxes)

    def _meet(self, client: bytes, outbox: Outbox) -> None:
        self._outboxes[client] = outbox
        if self._engine.weight_updates.report.version > 0:
            self._send(client, self._weights_changed(0))

    def _tell_weights(self) -> None:
        """They have changed."""
        message = self._weights_changed(max(0, len(self._history.changes) - 1))
        for client in self._outboxes:
            self._send(client, message)

    def _weights_changed(self, num_before: int) -> WeightsChanged:
        pages = self._engine.weight_updates.pages.digest.hex()
        return WeightsChanged(num_before, self._history.changes[num_before:], pages)

    def _send(self, client: bytes, message: Reply | WeightsChanged | Ended) -> None:
        """By the I/O thread, in order."""
        self._reply.send_multipart([client, encode(message)])

    def _submit(self, client: bytes, message: Submit) -> None:
        if client not in self._outboxes:
            return
        try:
            self._check_queue()
            entry = self._engine.add_request(
                message.request_id,
                processed_input(message),
                priority=message.priority,
                arrival_time=message.arrival_time,
                cache_salt=message.cache_salt,
                trace_headers=message.trace_headers,
                user=message.user,
            )
        except Exception as error:
            if not isinstance(error, DovetailError):
                logger.exception("request %s could not be added", message.request_id)
            self._outboxes[client].send(Refused(message.request_id, failure_of(error)))
            return
        seq_ids = [sequence.seq_id for sequence in entry.sequences]
        for seq_id in seq_ids:
            self._clients[seq_id] = client
        self._requests.setdefault(client, set()).add(message.request_id)
        self._owners[message.request_id] = client, seq_ids
        self._outboxes[client].send(
            Accepted(message.request_id, seq_ids, entry.metrics, entry.weight_version, entry.weight_checksum)
        )

    def _check_queue(self) -> None:
        waiting, limit = self._engine.core.num_waiting, self._max_num_waiting
        if limit is not None and waiting >= limit:
            raise QueueFull(
                f"{waiting} requests wait already, and server.max_num_waiting is {limit}: send this one again later",
                retry_after_s=_RETRY_S,
            )

    def _end(self, end: Callable[[], StepUpdate]) -> None:
        try:
            update = end()
        except Exception as error:
            logger.exception("requests could not be ended as they should")
            self._fail_ended(error)
        else:
            self._publish(update)

    def _call(self, client: bytes, message: Call) -> None:
        """What takes long answers with a future: steps go on until it is done."""
        self._answer(client, message, lambda: self._called(client, message.name)(**message.arguments))

    def _called(self, client: bytes, name: str) -> Callable[..., Any]:
        own = self._calls_of_clients.get(name)
        return self._calls[name] if own is None else partial(own, client)

    def _follow_cache(self, client: bytes) -> dict[str, Any]:
        """What clients need to compute the hashes of a prompt's blocks."""
        self._followers.add(client)
        return {
            "pages": self._engine.weight_updates.pages.digest.hex(),
            "drafters": drafters_in_blocks(self._engine.config),
        }

    def _start_weight_update(self, client: bytes, **arguments: Any) -> int:
        version = self._history.start_weight_update(**arguments)
        self._updater = client
        return version

    def _repeat_weight_change(self, client: bytes, change: Any) -> WeightsReport:
        """One client does not end what another has begun, unless that one is gone."""
        others = self._outboxes.keys() - {client}
        if self._engine.weight_updates.is_under_way and self._updater in others:
            raise WeightUpdateConflict("another client updates the weights: its update must end first")
        return self._history.repeat(change)

    def _answer(self, client: bytes, message: Call, call: Callable[[], Any]) -> None:
        try:
            value = call()
            if isinstance(value, Future):
                value.add_done_callback(
                    lambda done: self._do(partial(self._answer, client, message, partial(done.result, 0)))
                )
                return
            reply = Reply(message.call_id, msgspec.to_builtins(value), None)
        except Exception as error:
            if not isinstance(error, DovetailError):
                logger.exception("call of %s failed", message.name)
            reply = Reply(message.call_id, None, failure_of(error))
        self._send(client, reply)

    def _drop(self, client: bytes) -> None:
        """Nobody reads the client's requests any more."""
        self._followers.drop(client)
        outbox = self._outboxes.pop(client, None)
        if outbox is not None:
            outbox.close()
        request_ids = list(self._requests.pop(client, ()))
        if request_ids:
            logger.warning("a client is gone: its %d requests are aborted", len(request_ids))
            self._end(partial(self._engine.abort_request, request_ids))

    def _publish(self, update: StepUpdate) -> None:
        if not update.has_news:
            return
        usage = self._engine.cache_statistics().usage
        if len(self._outboxes) == 1:
            next(iter(self._outboxes.values())).send(Update(update, usage))
        else:
            for client, part in self._parts(update).items():
                if client in self._outboxes:
                    self._outboxes[client].send(Update(part, usage))
        for request_id, metrics in update.metrics.items():
            if metrics.finished_time is not None:
                self._forget(request_id)

    def _parts(self, update: StepUpdate) -> dict[bytes, StepUpdate]:
        """By client, what concerns its requests."""
        parts: dict[bytes, StepUpdate] = {}

        def part(client: bytes) -> StepUpdate:
            if client not in parts:
                parts[client] = StepUpdate(counts=None if update.counts is None else [])
            return parts[client]

        start = 0
        for index, seq_id in enumerate(update.seq_ids):
            count = 1 if update.counts is None else update.counts[index]
            mine = part(self._clients[seq_id])
            mine.seq_ids.append(seq_id)
            mine.token_ids += update.token_ids[start : start + count]
            if mine.counts is not None:
                mine.counts.append(count)
            start += count
        for end in update.ends:
            part(self._clients[end.seq_id]).ends.append(end)
        for seq_id, logprobs in update.logprobs.items():
            part(self._clients[seq_id]).logprobs[seq_id] = logprobs
        for seq_id, spans in update.accepted_spans.items():
            part(self._clients[seq_id]).accepted_spans[seq_id] = spans
        for request_id, entries in update.prompt_logprobs.items():
            part(self._owners[request_id][0]).prompt_logprobs[request_id] = entries
        for request_id, metrics in update.metrics.items():
            part(self._owners[request_id][0]).metrics[request_id] = metrics
        return parts

    def _fail_ended(self, error: BaseException) -> None:
        """Reports requests that ended without an update."""
        running = set(self._engine.request_ids)
        for request_id in self._owners.keys() - running:
            client = self._owners[request_id][0]
            self._forget(request_id)
            if client in self._outboxes:
                self._outboxes[client].send(Refused(request_id, failure_of(error)))

    def _forget(self, request_id: str) -> None:
        client, seq_ids = self._owners.pop(request_id)
        self._requests.get(client, set()).discard(request_id)
        for seq_id in seq_ids:
            self._clients.pop(seq_id, None)

    def _close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()
        self._reply.send(b"")
        self._reply.close()
        self._io.join()
        self._context.destroy(linger=0)
        self._engine.shutdown()


def _origin(engine: TokenEngine) -> EngineOrigin:
    pages = engine.weight_updates.pages
    identity = {
        "the version of dovetail": metadata.version("dovetail"),
        "the files of the checkpoint": blake2b(repr(pages.weights).encode(), digest_size=8).hexdigest(),
        "the plugins and their options": pages.plugins,
        "model.dtype": pages.dtype,
        "the dtype of adapters": pages.adapter_dtype,
        "the dtype of the KV cache": pages.kv_dtype,
        "the layout of KV pages": blake2b(repr(pages.layout).encode(), digest_size=8).hexdigest(),
        "executor.tensor_parallel": str(pages.tensor_parallel),
        "executor.pipeline_parallel": repr(pages.stage_layers),
    }
    return EngineOrigin(identity, time.monotonic())


_RETRY_S = 1.0
"""After so long another request may find a place in the queue."""
_CHECK_S = 0.25
"""Seconds between looks at the workers, while there are no steps."""
_FLUSH_S = 0.01
"""Seconds between looks at clients that are behind, while there are no steps."""
