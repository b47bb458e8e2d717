import numpy as np
from collections.abc import Mapping, Sequence
from dovetail.contracts.draft_stages import DraftStage
from dovetail.contracts.model import ModelContext
from dovetail.contracts.speculation import Draft, DraftBatch, DraftModel, DraftSetup, DraftWorker, SpeculationNeed
from dovetail.testing.draft_rounds import HostBatch, RequestStep
from dovetail.testing.suite import PluginSuite
from numpy.typing import NDArray
from typing import Any, ClassVar

MAX_SEQS = 8
MAX_MODEL_LEN = 256
DRAWS = 1600

class DraftWorkerSuite(PluginSuite):
    kind: ClassVar[str] = 'draft_worker'
    plugin: ClassVar[type[DraftWorker]]
    options: ClassVar[Mapping[str, Any]] = {}
    vocab_size: ClassVar[int] = 50
    hidden_size: ClassVar[int] = 8
    num_tokens: ClassVar[int] = 4
    num_layers: ClassVar[int] = 4
    num_draws: ClassVar[int] = DRAWS
    def setup(self) -> DraftSetup: ...
    def tokenizer_json(self) -> str: ...
    def stages(self) -> Mapping[str, DraftStage]: ...
    def own_model(self) -> DraftModel | None: ...
    def create_context(self) -> ModelContext: ...
    def create(self) -> DraftWorker: ...
    def need(self) -> SpeculationNeed: ...
    def batch(
        self,
        num_requests: int,
        max_drafts: int | None = None,
        num_known: int = 40,
        first: int = 0,
        end: int | None = None,
        known: NDArray[np.int32] | None = None,
    ) -> DraftBatch: ...
    def batch_of(self, steps: Sequence[RequestStep]) -> HostBatch: ...
    def text(self, period: int | None = None, seed: int = 0) -> list[int]: ...
    def drawn_places(self, num_draws: int, num_nodes: int = 3) -> NDArray[np.float64]: ...
    def check(self, draft: Draft | None, max_drafts: int) -> None: ...
