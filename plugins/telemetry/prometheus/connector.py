"""Metrics of an engine's KV connector."""

from __future__ import annotations

from dovetail.contracts.telemetry import ConnectorTotals
from dovetail.plugins.telemetry.prometheus.page import Labels, Page


def write_connector(page: Page, own: Labels, totals: ConnectorTotals | None) -> None:
    """Writes nothing where there is no connector. `own`: labels of the engine."""
    if totals is None:
        return
    page.gauge(
        "dovetail:kv_connector_on",
        "0 once the KV connector raised and was switched off.",
        [(own, int(totals.is_on))],
    )
    for name, help_, value in (
        ("loaded_blocks", "Blocks that the KV connector had.", totals.num_loaded_blocks),
        ("saved_blocks", "Blocks that the KV connector took.", totals.num_saved_blocks),
        ("dropped_blocks", "Blocks not saved, since the connector was too slow.", totals.num_dropped_blocks),
        ("failed_records", "Records that a rank could not read or write.", totals.num_failures),
        ("corrupt_records", "Records that were not what was written.", totals.num_corrupt),
        ("load_timeouts", "Loads that took too long.", totals.num_timeouts),
    ):
        page.counter(f"dovetail:kv_connector_{name}_total", help_, [(own, value)])
