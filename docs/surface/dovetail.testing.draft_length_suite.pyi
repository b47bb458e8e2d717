from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.draft_length import DraftLength, DrafterFacts
from dovetail.contracts.speculation import Draft
from dovetail.testing.suite import PluginSuite
from typing import Any, ClassVar

VOCAB_SIZE = 20
NUM_STEPS = 60
FACTS = {'lookup': DrafterFacts(num_tokens=6, stateless=True), 'head': DrafterFacts(num_tokens=4, keeps_layers=True), 'tree': DrafterFacts(num_tokens=5, trees=True)}
OTHERS = {'other': DrafterFacts(num_tokens=3)}
Answers = list[tuple[str, int, int]]

class DraftLengthSuite(PluginSuite):
    kind: ClassVar[str] = 'draft_length'
    plugin: ClassVar[type[DraftLength]]
    options: ClassVar[Mapping[str, Any]] = {}
    def create(self) -> DraftLength: ...


@dataclass
class Run:
    length: DraftLength
    chance: float
    seed: int = 0
    checks_side_effects: bool = False
    def ready(self) -> Run: ...
    def steps(self, seq_ids: Sequence[int], num_steps: int = NUM_STEPS) -> None: ...
    def ask(
        self,
        name: str,
        seq_ids: Sequence[int],
        most: Sequence[int],
        num_requests: int | None = None,
    ) -> list[int]: ...
    def keep(
        self,
        names: Sequence[str],
        seq_ids: Sequence[int],
        drafts: Sequence[Draft],
        num_requests: int | None = None,
    ) -> list[int]: ...
    def forget(self, seq_ids: Sequence[int]) -> None: ...

def some_draft(name: str, size: int, seed: int, *, probs: bool | None = None) -> Draft: ...
def redrawn(draft: Draft, node: int, seed: int) -> Draft: ...
