"""The table of docs/from-vllm.md, made from the table of names: `python -m dovetail.vllm.settings_doc FILE`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from dovetail.config.foreign_names import ForeignName
from dovetail.vllm.settings import VLLM_NAMES

BEGIN = "<!-- made by python -m dovetail.vllm.settings_doc -->"
END = "<!-- end of what is made -->"


def markdown_table(names: Mapping[str, ForeignName]) -> str:
    """The table of docs/from-vllm.md."""
    lines = ["| vLLM | config key | status |", "| --- | --- | --- |"]
    for name in names.values():
        key = ", ".join(f"`{key}`" for key in (name.key, *name.also) if key)
        lines.append(f"| `{name.flag}` | {key} | {_status_cell(name)} |")
    return "\n".join(lines)


def _status_cell(name: ForeignName) -> str:
    if name.status == "works":
        parts = [f"works: {name.note}" if name.note else "works"]
    else:
        parts = [name.status + (", because " if name.status == "refused" else ": ") + name.refusal]
    if name.values:
        pairs = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in name.values.items())
        parts.append(f"Values: {pairs}.")
    if name.parts:
        keys = ", ".join(f"`{part.name}`{f' (`{part.key}`)' if part.key else ''}" for part in name.parts.values())
        parts.append(f"Keys: {keys}.")
    for reason in dict.fromkeys(name.refuses.values()):
        values = [f"`{value}`" for value, given in name.refuses.items() if given == reason]
        parts.append(f"{', '.join(values)} {'is' if len(values) == 1 else 'are'} refused: {reason}.")
    if name.no_effect and name.status != "works":
        parts.append(f"Taken without effect: {', '.join(f'`{value}`' for value in name.no_effect)}.")
    return ". ".join(part.rstrip(".") for part in parts).replace("|", "\\|")


def with_table(page: str) -> str:
    """The page with the table of today between its two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{markdown_table(VLLM_NAMES)}\n\n{END}{tail}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")
