"""An engine with a KV connector, or without: what the step loop and the calls between steps see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dovetail.config.resolved import ResolvedConfig
from dovetail.engine.core import EngineCore
from dovetail.engine.external.blocks import ExternalBlocks, ExternalStatistics
from dovetail.engine.external.namespace import exchange_namespace
from dovetail.engine.regions import Regions
from dovetail.engine.sequence import Sequence
from dovetail.engine.setup import EngineParts
from dovetail.engine.weights.held import HeldWeights


class BlocksElsewhere(Protocol):
    """KV blocks that are kept besides the device."""

    @property
    def statistics(self) -> ExternalStatistics | None:
        """Counts; None without a connector."""

    @property
    def is_due(self) -> bool:
        """Whether a step should be taken for it. From any thread."""

    def consider(self, sequence: Sequence) -> None:
        """A new request, whose prompt may be there."""

    def tick(self) -> None:
        """Between steps, before one is scheduled."""

    def flush(self) -> None:
        """After a step."""

    def settle(self) -> None:
        """Waits, a few seconds at most, until what was computed is saved."""

    def abandon(self) -> None:
        """Nothing that is under way may reach a page any more."""

    def replaced(self, parts: EngineParts, core: EngineCore) -> None:
        """The KV memory is another one."""

    def close(self) -> None:
        """The engine shuts down."""


class _NoConnector:
    """Nothing is kept."""

    statistics = None
    is_due = False

    def consider(self, sequence: Sequence) -> None:
        return None

    def tick(self) -> None:
        return None

    def flush(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def abandon(self) -> None:
        return None

    def replaced(self, parts: EngineParts, core: EngineCore) -> None:
        return None

    def close(self) -> None:
        return None


NO_CONNECTOR: BlocksElsewhere = _NoConnector()
"""Of an engine whose config names none."""


class _Connected:
    """The engine's connector, under the weights and the memory that it has now."""

    def __init__(
        self,
        config: ResolvedConfig,
        parts: EngineParts,
        weights: HeldWeights,
        core: EngineCore,
        regions: Regions,
        notify: Callable[[], None],
    ):
        """Opens it. Raises what opening raises."""
        assert config.kv_connector is not None
        assert parts.create_connector is not None
        self._config = config
        self._parts = parts
        self._weights = weights
        self._core = core
        self._regions = regions
        self._pages = weights.pages
        self._blocks = ExternalBlocks(
            parts.create_connector,
            parts.workers,
            parts.kv,
            exchange_namespace(config, weights.pages),
            load_s=config.kv_connector.load_s,
            queued_bytes=config.kv_connector.queued_bytes,
            notify=notify,
        )

    @property
    def statistics(self) -> ExternalStatistics:
        return self._blocks.statistics

    @property
    def is_due(self) -> bool:
        # Nothing is exchanged in a sleep, and the step loop must not wait for it.
        return self._blocks.is_due and not self._regions.is_asleep

    def consider(self, sequence: Sequence) -> None:
        self._blocks.consider(sequence)

    def tick(self) -> None:
        if self._regions.is_asleep:
            return
        if self._weights.pages is not self._pages:
            self._reopen()
        step = self._core.next_step
        self._blocks.tick(may_place=step is None or self._core.is_in_flight(step))

    def flush(self) -> None:
        if not self._regions.is_asleep:
            self._blocks.flush()

    def settle(self) -> None:
        if not self._regions.is_asleep:
            self._blocks.flush(waits=True)

    def abandon(self) -> None:
        self._blocks.abandon()

    def replaced(self, parts: EngineParts, core: EngineCore) -> None:
        self._parts, self._core = parts, core
        self._reopen()

    def close(self) -> None:
        self._blocks.close()

    def _reopen(self) -> None:
        self._pages = self._weights.pages
        self._blocks.reopen(self._parts.kv, exchange_namespace(self._config, self._pages))


def connect_blocks(
    config: ResolvedConfig,
    parts: EngineParts,
    weights: HeldWeights,
    core: EngineCore,
    regions: Regions,
    notify: Callable[[], None],
) -> BlocksElsewhere:
    """The exchange of an engine with the connector of its config."""
    if config.kv_connector is None:
        return NO_CONNECTOR
    return _Connected(config, parts, weights, core, regions, notify)
