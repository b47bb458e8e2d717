"""The adapters of an engine as its requests meet them; an engine that serves none refuses whoever names one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import RequestError
from dovetail.contracts.lora import AdapterConflict, LoadedLoRA, LoRARequest
from dovetail.engine.adapters.adapter import Adapter
from dovetail.engine.adapters.known import KnownAdapter, KnownAdapters, describe
from dovetail.engine.adapters.slots import AdapterSlots
from dovetail.engine.request_table import RequestTable
from dovetail.engine.sequence import Sequence

Adapt = Callable[[Sequence, Adapter, str | None], None]
"""Gives a sequence the adapter that it waited for; the last argument is the cache salt of its request."""


class ServedAdapters:
    """Used by the engine's thread, but for `has_news`, and for the answers of `start`, which the reading thread makes:
    those use only what says that it may be asked from any thread."""

    def __init__(self, config: ResolvedConfig, requests: RequestTable, notify: Callable[[], None]):
        """`notify`: called, from any thread, when there is news."""
        self._requests = requests
        self._known = KnownAdapters(config, config.lora, notify) if config.lora is not None else None

    @property
    def slots(self) -> AdapterSlots | None:
        """Those of the workers; None where no adapters are served."""
        return self._known.slots if self._known is not None else None

    @property
    def has_news(self) -> bool:
        """Whether `take` has something to do. From any thread."""
        return self._known is not None and bool(self._known.landed or self._known.slots.lost)

    def read_configured(self) -> None:
        """Reads those of the config. Raises `ConfigError` for one that cannot be used."""
        if self._known is not None:
            self._known.read_configured()

    def named(self, request: LoRARequest | None) -> KnownAdapter | None:
        """The adapter that a new request names. Raises `RequestError`."""
        return None if request is None else self._served().start(request)

    def read(self, request: LoRARequest | None) -> KnownAdapter | None:
        """The adapter that a sequence outside of any request names. Raises `RequestError` for one that is not read."""
        known = self.named(request)
        if known is not None and known.adapter is None:
            raise RequestError(f"adapter {known.name!r} is not read yet: call add_lora first")
        return known

    def wait(self, known: KnownAdapter | None, sequences: list[Sequence], cache_salt: str | None) -> None:
        """A new request is held until its adapter is read, if it is not yet."""
        if known is not None and sequences[0].adapter is None:
            self._served().wait(known, sequences, cache_salt)

    def take(self, adapt: Adapt) -> Iterator[tuple[str, str]]:
        """Gives the requests that waited their adapters. Yields ids and messages of those that must end, since their
        adapter cannot be had."""
        if self._known is None:
            return
        while self._known.landed:
            waiting = self._known.landed.popleft()
            adapter = waiting.known.adapter
            if adapter is None:
                yield waiting.sequences[0].request_id, str(waiting.known.reading.exception())
                continue
            for sequence in waiting.sequences:
                adapt(sequence, adapter, waiting.cache_salt)
        lost, self._known.slots.lost = self._known.slots.lost, set()
        for entry in self._requests.entries() if lost else ():
            adapter = entry.sequences[0].adapter
            if adapter is not None and adapter.digest in lost:
                yield entry.request_id, adapter.loss

    def start(self, request: LoRARequest) -> Future[LoadedLoRA]:
        """See `TokenEngine.start_lora`."""
        served = self._served()
        known = served.start(request)
        served.refuse_changed(known)
        answer: Future[LoadedLoRA] = Future()

        def answered(reading: Future[Adapter]) -> None:
            error = reading.exception()
            if error is not None:
                answer.set_exception(error)
            elif not served.has(known):
                answer.set_exception(AdapterConflict(f"adapter {known.name!r} was removed while it was read"))
            else:
                answer.set_result(describe(known, reading.result(), served.slots, self._num_requests(known.name)))

        known.reading.add_done_callback(answered)
        return answer

    def remove(self, adapter: str | int) -> None:
        """See `TokenEngine.remove_lora`."""
        self._served().remove(adapter, self._num_requests)

    def pin(self, adapter: str | int) -> None:
        """See `TokenEngine.pin_lora`."""
        self._served().pin(adapter)

    def unpin(self, adapter: str | int) -> None:
        """See `TokenEngine.unpin_lora`."""
        self._served().unpin(adapter)

    def listed(self) -> list[LoadedLoRA]:
        """See `TokenEngine.list_loras`."""
        if self._known is None:
            return []
        counts = Counter(entry.adapter for entry in self._requests.entries())  # once for all: steps wait meanwhile
        return self._known.listed(counts.__getitem__)

    def forget_slots(self) -> None:
        """The workers lose what is in slots: it is placed again when requests come."""
        if self._known is not None:
            self._known.slots.clear()

    def close(self) -> None:
        """Nothing is read any more. Does not wait."""
        if self._known is not None:
            self._known.close()

    def _served(self) -> KnownAdapters:
        if self._known is None:
            raise RequestError(
                "an adapter was named, and this engine serves none: set lora.enabled (enable_lora=True), and"
                " lora.max_loras and lora.max_rank as you need them"
            )
        return self._known

    def _num_requests(self, name: str) -> int:
        """Unfinished requests that use an adapter. From any thread."""
        return sum(entry.adapter == name for entry in self._requests.entries())
