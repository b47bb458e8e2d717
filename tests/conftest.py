"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--attention",
        default="auto",
        metavar="NAME",
        help="attention backend of the engine tests that name none themselves (default: auto)",
    )
