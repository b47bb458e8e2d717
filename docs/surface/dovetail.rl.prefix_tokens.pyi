from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

Decode = Callable[[Sequence[int]], str]

class PrefixOutcome(StrEnum):
    SAME = 'same'
    RETOKENIZED = 'retokenized'
    REWRITTEN = 'rewritten'
    NO_EOS = 'no_eos'
    DROPPED_TURN = 'dropped_turn'


@dataclass(frozen=True)
class PrefixVerdict:
    preserved: bool
    outcome: PrefixOutcome
    index: int | None
    turn: int | None
    resumed_at: int
    message: str

def replace_prefix_tokens(
    model_ids: Sequence[int],
    template_prefix_ids: Sequence[int],
    template_ids: Sequence[int],
    *,
    eos_token_ids: Collection[int],
    decode: Decode,
    keep_rewritten: bool = False,
) -> tuple[list[int], PrefixVerdict]: ...
