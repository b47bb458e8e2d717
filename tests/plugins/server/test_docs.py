"""The route that docs/routes.md shows passes the suite."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dovetail.plugins.server.live import live_server
from dovetail.testing.route_suite import GeneratingRouteSuite

DOCS = Path(__file__).resolve().parents[3] / "docs" / "routes.md"


def example() -> Any:
    """The class in the page's first block of Python."""
    source = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(source, str(DOCS), "exec", dont_inherit=True), names)
    return names["TellRoute"]


class TestTheExample(GeneratingRouteSuite):
    route_class = example()
    serve = staticmethod(live_server)
    path = "/tell"
    streams = {}  # noqa: RUF012  # it streams whatever is asked
    test_needs_no_torch = None  # its module is a page

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt}
