"""What a plugin's modules import of Dovetail, and may not."""

from __future__ import annotations

from collections.abc import Iterator

import dovetail
from dovetail.commands.diagnosis.finding import Finding, finding
from dovetail.commands.diagnosis.reach import widely
from dovetail.commands.diagnosis.sources import Import, find_once, unit_of
from dovetail.commands.diagnosis.surface import ALL_KINDS, is_ours, open_to
from dovetail.registry.entries import Entry


def examine_imports(entry: Entry) -> Iterator[Finding]:
    """Findings about what a plugin's modules import of Dovetail, from their source alone, but for
    what other classes in them import. Where the entry's kind is
    not known, only what no plugin may import."""
    for source, one in widely(entry.reference).imports():
        if not is_ours(one.module) or unit_of(one.module) == unit_of(source.module):
            continue
        kinds = _open_to(one)
        what = one.module if one.name is None else f"{one.name} from {one.module}"
        place = f"({source.path}, line {one.line})"
        if not kinds:
            message = f"{entry.label}: {what} is imported, which is not public {place}"
            yield finding("private-import", entry.label, message)
        elif entry.kind in ALL_KINDS - kinds:
            message = f"{entry.label}: {what} is imported, which is for plugins of kind {min(kinds)} {place}"
            yield finding("foreign-import", entry.label, message)


def _open_to(one: Import) -> frozenset[str]:
    """The kinds of plugins that may import this; none where it is not public."""
    if one.module == dovetail.__name__ and one.name in (None, "__version__"):
        return ALL_KINDS  # that alone brings no engine
    if one.name is None or one.name == "*":
        return open_to(one.module)
    inner = f"{one.module}.{one.name}"
    if kinds := open_to(inner):
        return kinds
    if one.module == dovetail.__name__:
        return open_to(one.module) if one.name in dovetail.__all__ else frozenset()
    # `from dovetail.nn import loading`: perhaps a module that is not public, within one that is.
    return open_to(one.module, one.name) if find_once(inner) is None else frozenset()
