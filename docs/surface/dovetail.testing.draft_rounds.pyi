import numpy as np
from collections.abc import Sequence
from dataclasses import dataclass, field
from dovetail.contracts.draft_target import TopTokens
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft, DraftBatch, DraftWorker
from numpy.typing import NDArray
from typing import Any


@dataclass(frozen=True)
class RequestStep:
    seq_id: int
    token_ids: Sequence[int]
    first: int
    end: int
    max_drafts: int
    num_prompt_tokens: int | None = None
    seed: int | None = None
    is_sampled: bool = False
    uniforms: NDArray[np.float64] | None = None
    drafted: Draft | None = None
    prediction: Sequence[int] | None = None
    forced: Sequence[int] = ()
    @property
    def chosen_seed(self) -> int: ...
    def sampling(self) -> SamplingParams: ...
    def top_tokens(self, vocab_size: int, count: int) -> TopTokens: ...
    def predicted(self) -> NDArray[np.int32] | None: ...
    def stream(self) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class HostBatch:
    batch: DraftBatch
    def overwrite(self) -> None: ...


@dataclass
class Talk:
    seq_id: int
    text: list[int]
    num_known: int
    drafts: list[Any] = field(default_factory=list)
    num_taken: int = 0
    def advance(self, worker: DraftWorker) -> None: ...
    def step(self, max_drafts: int) -> RequestStep: ...
    def take(self, draft: Draft | None) -> None: ...


@dataclass
class Misled:
    seq_id: int
    text: Sequence[int]
    is_right: bool
    vocab_size: int
    num_taken: int = 0
    def step(self, max_drafts: int) -> RequestStep: ...
    def advance(self, worker: DraftWorker, draft: Draft | None) -> None: ...

def first_path(draft: Draft) -> list[int]: ...
def places_in(
    probs: NDArray[np.float64],
    token_ids: Sequence[int],
    random: np.random.Generator,
) -> NDArray[np.float64]: ...
def text(vocab_size: int, period: int | None = None, seed: int = 0) -> list[int]: ...
def assert_same_draft(draft: Draft | None, other: Draft | None, what: str = '') -> None: ...
def as_lists(draft: Draft | None) -> Any: ...
