"""Which weights an engine has: their version and checksum, and what KV pages follow from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.regions import RegionState
from dovetail.contracts.weight_transport import WeightsReport, WeightUpdateConflict
from dovetail.engine.draft_blocks import draft_blocks
from dovetail.engine.kv.hashing import PagesIdentity, prefix_seed
from dovetail.engine.regions import Regions
from dovetail.engine.request_table import RequestTable
from dovetail.engine.setup import pages_identity
from dovetail.engine.telemetry import Telemetry


class HeldWeights:
    """The weights of one engine."""

    def __init__(
        self,
        config: ResolvedConfig,
        layout: KVLayout,
        telemetry: Telemetry,
        regions: Regions,
        requests: RequestTable,
        forget_prefixes: Callable[[], object],
    ):
        """As they were loaded at the start. `regions`: which of them are whole. `requests`: those that they compute.
        `forget_prefixes`: empties the prefix cache."""
        self._config = config
        self._layout = layout
        self._telemetry = telemetry
        self._regions = regions
        self._requests = requests
        self._forget_prefixes = forget_prefixes
        self.report = WeightsReport(version=0, checksum="")
        self.pages: PagesIdentity = pages_identity(config, layout, self.report)
        """What KV pages that are computed now follow from: none of an earlier version is found in the prefix cache."""

    @property
    def is_valid(self) -> bool:
        """Whether all are whole."""
        return all(one.state is not RegionState.INVALID for one in self._regions.statuses)

    def check_valid(self) -> None:
        """Raises `WeightUpdateConflict` where some are not whole, so that they cannot be updated in part."""
        for one in self._regions.statuses:
            if one.state is RegionState.INVALID:
                raise WeightUpdateConflict(self._regions.why_invalid(one.name))

    def check_awake(self, region: str) -> None:
        """Raises `WeightUpdateConflict` for weights that sleep."""
        if self._regions.state(region) is RegionState.ASLEEP:
            raise WeightUpdateConflict(f"{region} sleeps and cannot be updated: call wake_up first")

    def invalidate(self, names: Iterable[str], reason: str) -> None:
        """Some of these regions' weights are new and some are old: nothing is generated with them until all are
        replaced."""
        for name in names:
            if self._regions.state(name) is not RegionState.INVALID:
                self._regions.invalidate(name, reason)

    def read_again(self) -> None:
        """What the checkpoint has now was loaded."""
        self.replaced((), WeightsReport(version=self.report.version + 1, checksum=""))

    def replaced(self, names: Iterable[str], report: WeightsReport) -> None:
        """Others took the place of these regions' weights, and they are whole. No request has KV blocks now."""
        for name in names:
            if self._regions.state(name) is RegionState.INVALID:
                self._regions.restore(name)
        self.report = report
        self.pages = pages_identity(self._config, self._layout, report)
        self._forget_prefixes()  # nobody would find what the old weights computed
        self._rename_blocks()
        self._telemetry.weights_changed(report)

    def _rename_blocks(self) -> None:
        """Requests that came before find no blocks of the old weights, and name theirs by the new ones."""
        for entry in self._requests.entries():
            for sequence in entry.sequences:
                adapter = sequence.adapter.digest if sequence.adapter is not None else None
                seed = prefix_seed(self.pages, adapter, entry.cache_salt)
                sequence.start_hashes(seed, draft_blocks(self._config, sequence.drafter, seed))
