"""A cache of Triton's that was filled in another folder: its indexes name files by absolute paths."""

from __future__ import annotations

import json
from pathlib import Path


def settle(folder: Path) -> None:
    """Lets the indexes of a cache name the files that lie next to them, wherever the cache was filled. Without this,
    Triton (3.6 to 3.9) compiles anew what it does not find at the old place."""
    for index in folder.glob("*/__grp__*.json"):
        paths = json.loads(index.read_text())["child_paths"]
        here = {name: str(index.parent / Path(path).name) for name, path in paths.items()}
        if here != paths:
            index.write_text(json.dumps({"child_paths": here}))
