"""How to build a worker in any process. Light on purpose: what a driver pickles must not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.executor import Placement
from dovetail.contracts.joining import ComparesMachines
from dovetail.contracts.logits import LogitsSetup
from dovetail.worker.draft_tokenizers import DraftTokenizers

if TYPE_CHECKING:
    from dovetail.worker.model_worker import ModelWorker


@dataclass(frozen=True)
class ModelWorkerSpec(ComparesMachines):
    """A worker that runs the config's model."""

    config: ResolvedConfig
    logits: LogitsSetup | None = None
    """What logits processors are created with; None where the config names none."""
    tokenizers: DraftTokenizers = field(default_factory=DraftTokenizers)
    """Those that drafters are handed."""

    @property
    def num_threads(self) -> int | None:
        """Threads per worker that the config asks for; None leaves it to the executor."""
        return self.config.num_threads

    def create(self, placement: Placement) -> ModelWorker:
        """Builds the worker of one rank; plugins are loaded and compared here, weights are not."""
        from dovetail.worker.model_worker import ModelWorker

        return ModelWorker(self.config, placement, self.logits, self.tokenizers)

    def machine_facts(self) -> Any:
        """Plugins, model files and instruction sets."""
        from dovetail.worker.machine.comparison import machine_facts

        return machine_facts(self.config)

    def differences(self, mine: Any, theirs: Any) -> Sequence[str]:
        """Names each distribution and each model that is missing, or is another one."""
        from dovetail.worker.machine.comparison import differences

        return differences(mine, theirs, self.config.device_type)
