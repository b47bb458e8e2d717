"""An adapter that an engine has read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dovetail.contracts.step import AdapterPlacement
from dovetail.worker.adapters.peft_files import Marks, current_marks


@dataclass(frozen=True, slots=True)
class Adapter:
    """What requests refer to. Two of equal content have the same digest, and share slots and cached prefixes."""

    name: str
    path: str
    digest: str
    rank: int
    num_bytes: int
    marks: Marks
    """Of its files, when they were read."""

    @property
    def is_unchanged(self) -> bool:
        """Whether its files are still those that were read, so that workers can read them again."""
        return current_marks(Path(self.path)) == self.marks

    @property
    def is_replaced(self) -> bool:
        """Whether other files are in their place."""
        return current_marks(Path(self.path)) not in (None, self.marks)

    @property
    def loss(self) -> str:
        """What a request is answered whose adapter cannot be brought to a slot any more."""
        return (
            f"the files of adapter {self.name!r} in {self.path} changed or are gone since it was loaded, and workers"
            " have to read it again: put them back, or unload it and load it again"
        )

    def placement(self, slot: int) -> AdapterPlacement:
        """What tells the workers to bring it to a slot."""
        return AdapterPlacement(slot, self.name, self.path, self.digest)
