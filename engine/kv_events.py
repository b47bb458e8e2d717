"""Who is notified of what the prefix cache has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dovetail.contracts.router import CacheEvent
from dovetail.engine.exclusive_use import ExclusiveUse, exclusive
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.kv.pool import PrefixCacheReset

logger = logging.getLogger(__name__)

KVListener = Callable[[Sequence[CacheEvent]], None]
"""Takes the KV events of a step, in their order."""


class KVEvents:
    """Notifies listeners of the KV events of one engine, in the thread that is in the engine. Where nobody listens,
    nothing is noted."""

    def __init__(self, use: ExclusiveUse, kv: KVCacheManager, listeners: Iterable[KVListener] = ()):
        self.use = use
        self._kv = kv
        self._listeners: list[KVListener] = []
        self._is_following = False
        """Whether changes are noted."""
        for listener in listeners:
            self.listen(listener)

    @exclusive
    def listen(self, listener: KVListener) -> Callable[[], None]:
        """See `LLMEngine.on_kv_events`."""
        self.publish()
        self._kv.cache_events.follow()
        self._is_following = True
        self._listeners.append(listener)
        self._notify(listener, self.snapshot())
        return partial(self._forget, listener)

    def snapshot(self) -> list[CacheEvent]:
        """What the prefix cache has now, for whoever missed events. Call it where all events are published."""
        return self._kv.cache_events.snapshot()

    def publish(self) -> None:
        """A step is over, or the cache was changed between two steps: listeners are notified."""
        if not self._is_following:
            return
        cache = self._kv.cache_events
        if not self._listeners:
            cache.unfollow()
            self._is_following = False
        elif cache.has_any:
            events = cache.take()
            for listener in self._listeners[:]:
                self._notify(listener, events)

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """See `TokenEngine.reset_prefix_cache`."""
        reset = self._kv.reset_prefix_cache()
        self.publish()
        return reset

    def replace_memory(self, kv: KVCacheManager) -> None:
        """The KV memory is another, and empty."""
        kv.cache_events.replaces(self._kv.cache_events)
        self._kv = kv
        self.publish()

    def _notify(self, listener: KVListener, events: Sequence[CacheEvent]) -> None:
        try:
            listener(events)
        except Exception:
            logger.exception("a listener of KV events raised, and is notified no more")
            self._forget(listener)

    def _forget(self, listener: KVListener) -> None:
        # From any thread; what is noted meanwhile is dropped at the next step.
        if listener in self._listeners:
            self._listeners.remove(listener)
