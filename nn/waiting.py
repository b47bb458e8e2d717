"""Modules that may wait for the device, so that a step with them cannot be captured in a graph."""

from __future__ import annotations

from abc import ABC, abstractmethod


class MayWait(ABC):
    """A module whose forward pass may have to wait for the device, as where it must know how many rows there are of a
    kind. The host asks each module of a model before it captures a step: a capture that fails would leave the process
    damaged, so it is no way to find out."""

    @abstractmethod
    def why_it_waits(self) -> str | None:
        """Returns the reason, as a sentence without an end mark that says what would help; None: this module does not
        wait."""
