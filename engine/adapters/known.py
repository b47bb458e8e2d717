"""The adapters that an engine knows by name. Their files are read and checked by a thread of its own, while requests
that want them are held."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.config.resolved import ResolvedConfig, ResolvedLoRA
from dovetail.config.tree import nearest
from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.contracts.lora import AdapterConflict, AdapterNotFound, LoadedLoRA, LoRARequest
from dovetail.engine.adapters.adapter import Adapter
from dovetail.engine.adapters.completeness import check_whole
from dovetail.engine.adapters.fitting import check_fit, check_numbers
from dovetail.engine.adapters.slots import AdapterSlots
from dovetail.engine.sequence import Sequence
from dovetail.worker.adapters.peft_files import current_marks, open_adapter
from dovetail.worker.adapters.planning import plan_space

if TYPE_CHECKING:
    from dovetail.nn.adapters import AdapterSpace


@dataclass(frozen=True, eq=False)
class KnownAdapter:
    """A name that requests may use. It is read already, or will be."""

    name: str
    int_id: int
    path: str
    """Absolute."""
    reading: Future[Adapter]

    @property
    def adapter(self) -> Adapter | None:
        """None while it is read, and where it could not be."""
        return self.reading.result() if self.reading.done() and self.reading.exception() is None else None

    @property
    def has_failed(self) -> bool:
        """Whether it could not be read."""
        return self.reading.done() and self.reading.exception() is not None


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A new request whose adapter is being read."""

    sequences: list[Sequence]
    cache_salt: str | None
    known: KnownAdapter


class KnownAdapters:
    """Made with an engine that serves adapters; used by its thread, but for what says otherwise."""

    def __init__(self, config: ResolvedConfig, lora: ResolvedLoRA, notify: Callable[[], None]):
        """`notify`: called, from any thread, when a request need not wait any more."""
        self.slots = AdapterSlots(lora.max_loras, self._of_digest)
        self.landed: deque[WaitingRequest] = deque()
        """Requests whose adapters were read since the last step, or could not be."""
        self._config = config
        self._lora = lora
        self._notify = notify
        self._known: dict[str, KnownAdapter] = {}
        self._failed: deque[KnownAdapter] = deque()
        """Those that could not be read, and are to be forgotten. The reading thread appends."""
        self._space: AdapterSpace | None = None
        """The reading thread's."""
        self._reader = ThreadPoolExecutor(1, "dovetail-adapter")

    def read_configured(self) -> None:
        """Reads those of the config. Raises `ConfigError` for one that cannot be used."""
        started = [self.start(LoRARequest(name, 0, path)) for name, path in self._lora.modules]
        for known in started:
            try:
                known.reading.result()
            except RequestError as error:
                raise ConfigError(f"lora.modules.{known.name}: {error}") from error

    def start(self, request: LoRARequest) -> KnownAdapter:
        """The adapter that a request names; its files begin to be read where it is new.

        Raises `AdapterNotFound` for a name without a path that is not known, `AdapterConflict` for a name or a number
        that is another adapter's.
        """
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest(name, id, path), got {request!r}")
        self._forget_failed()
        name, path = request.lora_name, os.path.abspath(os.path.expanduser(request.lora_path))
        found = self._known.get(name)
        self._check_id(request, found)
        if found is not None:
            if request.lora_path and path != found.path:
                raise AdapterConflict(
                    f"an adapter {name!r} is loaded from {found.path}, and {path} was given: unload it first, or take"
                    " another name"
                )
            return found
        if not request.lora_path:
            known = f"loaded are {', '.join(sorted(self._known))}" if self._known else "none is loaded"
            raise AdapterNotFound(
                f"no adapter {name!r} is loaded ({known}): load it first (add_lora, or a LoRARequest with lora_path;"
                " over HTTP /v1/load_lora_adapter)"
            )
        int_id = request.lora_int_id or 1 + max((each.int_id for each in self._known.values()), default=0)
        known_ = KnownAdapter(name, int_id, path, self._reader.submit(self._read, name, path))
        self._known[name] = known_
        known_.reading.add_done_callback(partial(self._note_failure, known_))
        return known_

    def refuse_changed(self, known: KnownAdapter) -> None:
        """Raises `AdapterConflict` where the files of an adapter changed since it was read: under its name there is one
        content at a time."""
        if known.adapter is not None and known.adapter.is_replaced:
            raise AdapterConflict(
                f"the files of adapter {known.name!r} in {known.path} changed since it was loaded: unload it, and"
                " load it again"
            )

    def wait(self, known: KnownAdapter, sequences: list[Sequence], cache_salt: str | None) -> None:
        """The sequences of a new request are held until their adapter is read."""
        for sequence in sequences:
            sequence.wait_for_adapter()
        known.reading.add_done_callback(partial(self._land, WaitingRequest(sequences, cache_salt, known)))

    def remove(self, adapter: str | int, num_requests: Callable[[str], int]) -> None:
        """Forgets an adapter, by name or number. Raises `AdapterNotFound`, and `AdapterConflict` while requests use
        it; `num_requests` counts them by name."""
        known = self.get(adapter)
        if count := num_requests(known.name):
            raise AdapterConflict(
                f"adapter {known.name!r} is used by {count} request{'s' if count > 1 else ''}: let them end, or abort"
                " them, and unload it then"
            )
        del self._known[known.name]
        removed = known.adapter
        if removed is not None and not self._of_digest(removed.digest):
            self.slots.remove(removed.digest)

    def pin(self, adapter: str | int) -> None:
        """An adapter keeps its slot from when it first gets one. Raises `AdapterNotFound`, and `RequestError` where no
        slot would be left for others."""
        known = self.get(adapter)
        if known.adapter is None:
            raise RequestError(f"adapter {known.name!r} is still being read: pin it later")
        digest, slots = known.adapter.digest, self.slots
        if not slots.is_pinned(digest) and slots.num_pinned + 1 >= slots.num_slots:
            raise RequestError(
                f"adapter {known.name!r} cannot be pinned: lora.max_loras is {slots.num_slots}, {slots.num_pinned}"
                " adapters are pinned, and one slot must be left for the others; raise lora.max_loras"
            )
        slots.pin(digest)

    def unpin(self, adapter: str | int) -> None:
        """An adapter, and those of equal content, may lose the slot to others. Raises `AdapterNotFound`."""
        known = self.get(adapter)
        if known.adapter is not None:
            self.slots.unpin(known.adapter.digest)

    def get(self, adapter: str | int) -> KnownAdapter:
        """An adapter by name or number. Raises `AdapterNotFound`."""
        self._forget_failed()
        for known in self._known.values():
            if adapter == (known.name if isinstance(adapter, str) else known.int_id):
                return known
        names = list(self._known)
        hint = nearest(adapter, names) if isinstance(adapter, str) and names else f"loaded are {', '.join(names)}"
        raise AdapterNotFound(f"no adapter {adapter!r} is loaded: {hint if names else 'none is'}")

    def has(self, known: KnownAdapter) -> bool:
        """Whether it was not removed. From any thread."""
        return self._known.get(known.name) is known

    def listed(self, num_requests: Callable[[str], int]) -> list[LoadedLoRA]:
        """Those that were read, in the order in which they were named."""
        return [
            describe(known, known.adapter, self.slots, num_requests(known.name))
            for known in self._known.values()
            if known.adapter is not None
        ]

    def close(self) -> None:
        """Nothing is read any more. Does not wait."""
        self._reader.shutdown(wait=False)

    def _note_failure(self, known: KnownAdapter, reading: Future[Adapter]) -> None:
        if known.has_failed:
            self._failed.append(known)

    def _forget_failed(self) -> None:
        """Their names and numbers are free again."""
        while self._failed:
            known = self._failed.popleft()
            if self.has(known):
                del self._known[known.name]

    def _check_id(self, request: LoRARequest, found: KnownAdapter | None) -> None:
        if not request.lora_int_id:
            return
        if found is not None and found.int_id != request.lora_int_id:
            raise AdapterConflict(
                f"adapter {request.lora_name!r} has the number {found.int_id}, and lora_int_id {request.lora_int_id}"
                " was given: give the number that it has, or 0"
            )
        for other in self._known.values():
            if other.int_id == request.lora_int_id and other.name != request.lora_name:
                raise AdapterConflict(
                    f"lora_int_id {request.lora_int_id} is that of adapter {other.name!r}, and {request.lora_name!r}"
                    " needs one of its own: give another, or 0"
                )

    def _of_digest(self, digest: str) -> list[Adapter]:
        """Those of one content that were read."""
        adapters = [known.adapter for known in self._known.values()]
        return [adapter for adapter in adapters if adapter is not None and adapter.digest == digest]

    def _read(self, name: str, path: str) -> Adapter:
        """In the reading thread."""
        try:
            files = open_adapter(Path(path))
            if self._space is None:
                self._space = plan_space(self._config, self._lora)
            check_fit(files, self._space)
            check_whole(files, self._space)
            check_numbers(files, self._space)
            digest = files.digest()
            if current_marks(files.path) != files.marks:
                raise ModelError(f"the files in {path} changed while they were read: load it again")
        except AdapterNotFound as error:
            raise AdapterNotFound(f"adapter {name!r} cannot be loaded: {error}") from None
        except (ModelError, OSError, MemoryError) as error:
            raise RequestError(f"adapter {name!r} cannot be loaded: {error}") from error
        return Adapter(name, path, digest, files.rank, files.num_bytes, files.marks)

    def _land(self, waiting: WaitingRequest, reading: Future[Adapter]) -> None:
        self.landed.append(waiting)
        self._notify()


def describe(known: KnownAdapter, adapter: Adapter, slots: AdapterSlots, num_requests: int) -> LoadedLoRA:
    """What `list_loras` reports of an adapter. From any thread."""
    return LoadedLoRA(
        name=known.name,
        int_id=known.int_id,
        path=known.path,
        digest=adapter.digest,
        rank=adapter.rank,
        num_bytes=adapter.num_bytes,
        is_in_slot=slots.has(adapter.digest),
        is_pinned=slots.is_pinned(adapter.digest),
        num_requests=num_requests,
    )
