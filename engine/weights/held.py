"""Which weights an engine has: their version and checksum, and what KV pages follow from."""

from __future__ import annotations

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.kv import KVLayout
from dovetail.contracts.weight_transport import WeightsReport, WeightUpdateConflict
from dovetail.engine.kv.hashing import PagesIdentity
from dovetail.engine.setup import pages_identity
from dovetail.engine.telemetry import Telemetry


class HeldWeights:
    """The weights of one engine."""

    def __init__(self, config: ResolvedConfig, layout: KVLayout, telemetry: Telemetry):
        """As they were loaded at the start."""
        self._config = config
        self._layout = layout
        self._telemetry = telemetry
        self._invalid = ""
        self.report = WeightsReport(version=0, checksum="")
        self.pages: PagesIdentity = pages_identity(config, layout, self.report)
        """What KV pages that are computed now follow from: none of an earlier version is found in the prefix cache."""

    @property
    def is_valid(self) -> bool:
        """Whether they are those of one version, so that the engine generates."""
        return not self._invalid

    def check_valid(self) -> None:
        """Raises `WeightUpdateConflict` where an update failed half-way."""
        if self._invalid:
            raise WeightUpdateConflict(
                f"the weights are invalid, since an update failed while it wrote them ({self._invalid}): update all"
                " weights again, or sleep(2) and wake_up(new_weights=True), which reads the checkpoint"
            )

    def invalidate(self, reason: str) -> None:
        """Some are new and some are old: nothing is generated until all are replaced."""
        self._invalid = reason

    def read_again(self) -> None:
        """What the checkpoint has now was loaded."""
        self._invalid = ""
        self.replaced(WeightsReport(version=self.report.version + 1, checksum=""))

    def replaced(self, report: WeightsReport) -> None:
        """Others took their place, and they are whole."""
        self._invalid = ""
        self.report = report
        self.pages = pages_identity(self._config, self._layout, report)
        self._telemetry.weights_changed(report)
