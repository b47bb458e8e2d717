"""vLLM's names of beam search's outputs."""

from __future__ import annotations

from dovetail.contracts.outputs import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]
