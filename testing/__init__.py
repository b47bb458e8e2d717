"""Conformance suites, and what tests of plugins are made of. Public and versioned like a contract."""

from __future__ import annotations

from dovetail.contracts.plugin import ContractVersion

VERSION = ContractVersion(1, 3)
"""Of this package's modules, which go by it together. A suite may get tests in a minor version: they ask for what the
contract says already."""
