"""Docstrings write `like so::` before an indented block, as Python's own tools do; in Markdown one colon is meant."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LiteralBlocks(griffe.Extension):
    """Takes one colon of two at the end of a line away."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the object's docstring in place."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
