from collections.abc import Callable, Collection, Sequence
from dovetail.contracts.prompts import PrefixOutcome, PrefixVerdict

__all__ = [
    "Decode",
    "PrefixOutcome",
    "PrefixVerdict",
    "replace_prefix_tokens",
]
Decode = Callable[[Sequence[int]], str]
def replace_prefix_tokens(
    model_ids: Sequence[int],
    template_prefix_ids: Sequence[int],
    template_ids: Sequence[int],
    *,
    eos_token_ids: Collection[int],
    decode: Decode,
    keep_rewritten: bool = False,
) -> tuple[list[int], PrefixVerdict]: ...
