"""The next prompt of a conversation, with the token ids that the model itself saw and produced.

A chat template renders the whole conversation anew for each turn, and a tokenizer splits the rendered text anew. The
ids of earlier turns then differ from those that the model produced, although the text may be the same: a trainer gets
log probabilities of tokens that nobody sampled, and turns that do not continue each other.

Example, with 2 as the end-of-sequence token (EOS)::

    model_ids            11 12 40 | 220 17 2                prompt | completion " 4"
    template_prefix_ids  11 12 40   1001 2                  the same conversation, rendered: 1001 is " 4" in one token
    template_ids         11 12 40   1001 2  21 22 40        with the next message, and the start of the next answer

    result               11 12 40   220 17 2  21 22 40      the model's ids, then the template's behind the same EOS

The idea is NeMo RL's. Here, the text decides which EOS of the rendering ends the model's turn, not its index.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile

from dovetail.contracts.prompts import PrefixOutcome, PrefixVerdict

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included and no spaces cleaned up."""

_SHOWN = 60
"""Characters of a turn that a message shows."""


def replace_prefix_tokens(
    model_ids: Sequence[int],
    template_prefix_ids: Sequence[int],
    template_ids: Sequence[int],
    *,
    eos_token_ids: Collection[int],
    decode: Decode,
    keep_rewritten: bool = False,
) -> tuple[list[int], PrefixVerdict]:
    """Puts the model's own ids in place of those that a chat template gave the same turns.

    Where the rendered text is the model's own up to an EOS, the result is `model_ids` and what the template has behind
    that EOS. A model's turn without an EOS (it was cut off at `max_tokens`, say) gets the template's. In all other
    cases the result is the rendering as it is, and the verdict says why: no turn is lost and none appears twice.

    Args:
        model_ids: prompt and completion of the last turn as the model saw and produced them; empty before the first.
        template_prefix_ids: the template's rendering up to that point: all messages up to the model's last one, without
            the start of another answer.
        template_ids: the whole new rendering.
        eos_token_ids: tokens that end a turn, of the model or of the template; at least one.
        decode: ids to text. Special tokens must be shown and spaces left as they are: with transformers
            `lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)`.
        keep_rewritten: whether the model's ids are kept where the template writes other text for turns before the new
            messages (`REWRITTEN`), as a trainer wants them that has one sequence for a conversation. The model then
            reads text that the template would have changed. Only where `template_prefix_ids` and `template_ids` show
            which EOS ends the model's turn: the renderings have equal turns, or the newer leaves out parts of them.

    Returns:
        The ids of the next prompt, and the verdict.

    Raises:
        ValueError: no EOS is given, `decode` gives no text for one, or the rendering of earlier turns is empty.
    """
    ends = frozenset(eos_token_ids)
    _check(ends, decode)
    if model_ids and not template_prefix_ids:
        raise ValueError("template_prefix_ids is empty: render the messages up to the model's last one")
    index = _first_difference(model_ids, template_ids)
    if index is None:
        verdict = PrefixVerdict(True, PrefixOutcome.SAME, None, None, 0, "the rendering starts with the model's ids")
        return list(template_ids), verdict
    splice = _Splice(model_ids, template_prefix_ids, template_ids, ends, decode, index)
    return splice.replaced(keep_rewritten)


class _Splice:
    """One call of `replace_prefix_tokens` whose rendering differs from the model's ids at `index`."""

    def __init__(
        self,
        model_ids: Sequence[int],
        template_prefix_ids: Sequence[int],
        template_ids: Sequence[int],
        ends: frozenset[int],
        decode: Decode,
        index: int,
    ):
        self._model_ids, self._template_ids, self._index = list(model_ids), list(template_ids), index
        self._is_ended = bool(model_ids) and model_ids[-1] in ends
        turns, rest = _turns(model_ids, ends)
        self._model = [decode(turn) for turn in (turns if self._is_ended else [*turns, rest])]
        old, rest = _turns(template_prefix_ids, ends)
        self._old, self._old_rest = [decode(turn) for turn in old], decode(rest)
        turns, _ = _turns(template_ids, ends)
        self._new = [decode(turn) for turn in turns]
        num_matched = len(self._model)
        # Where the template's own EOS of the model's turn is, if the turns are the same.
        self._eos = sum(map(len, turns[:num_matched])) + num_matched - 1

    def replaced(self, keep_rewritten: bool) -> tuple[list[int], PrefixVerdict]:
        """As `replace_prefix_tokens`."""
        turn = _first_difference(self._model, self._new)
        if turn is None:
            message = "the same text in other ids: the model's were kept"
            return self._spliced(PrefixOutcome.RETOKENIZED, None, message)
        outcome, message = self._difference(turn)
        if keep_rewritten and outcome is PrefixOutcome.REWRITTEN and self._is_aligned():
            return self._spliced(outcome, turn, f"{message}; the model's ids were kept")
        return self._template_ids, PrefixVerdict(False, outcome, self._index, turn, 0, message)

    def _spliced(self, outcome: PrefixOutcome, turn: int | None, message: str) -> tuple[list[int], PrefixVerdict]:
        resumed_at = self._eos + 1 if self._is_ended else self._eos
        token_ids = self._model_ids + self._template_ids[resumed_at:]
        return token_ids, PrefixVerdict(True, outcome, self._index, turn, resumed_at, message)

    def _difference(self, turn: int) -> tuple[PrefixOutcome, str]:
        """Why the turns differ from number `turn` on."""
        number, found = len(self._model), min(len(self._old), len(self._new))
        # Text behind the last EOS is a turn that has none; without it, the turn is not there at all.
        if len(self._old) < number and self._old_rest.strip():
            return PrefixOutcome.NO_EOS, f"the template ends {len(self._old)} of the {number} turns so far with an EOS"
        if found < number:
            message = f"the template has {found} turns of the {number} that the model saw and produced"
            return PrefixOutcome.DROPPED_TURN, message
        was, now = _shown(self._model[turn], self._new[turn])
        return PrefixOutcome.REWRITTEN, f"the template rewrote turn {turn}: {was!r} became {now!r}"

    def _is_aligned(self) -> bool:
        """Whether the turns of both renderings are the same up to the model's last, parts left out allowed."""
        number = len(self._model)
        return len(self._old) == number and all(map(_leaves_out, self._old, self._new[:number]))


def _check(ends: frozenset[int], decode: Decode) -> None:
    if not ends:
        raise ValueError("eos_token_ids is empty: give the tokens that end a turn")
    silent = [token for token in sorted(ends) if not decode([token])]
    if silent:
        raise ValueError(
            f"decode gives no text for {silent}, so turns cannot be told apart: have it show special tokens"
            " (skip_special_tokens=False)"
        )


def _first_difference(wanted: Sequence[object], found: Sequence[object]) -> int | None:
    """First index at which `found` is not `wanted`, or at which it ends; None where it starts with all of `wanted`."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, found, strict=False)))
    return None if same == len(wanted) else same


def _turns(token_ids: Sequence[int], ends: frozenset[int]) -> tuple[list[list[int]], list[int]]:
    """The ids in front of each EOS, and those behind the last."""
    turns: list[list[int]] = []
    turn: list[int] = []
    for token in token_ids:
        if token in ends:
            turns.append(turn)
            turn = []
        else:
            turn.append(token)
    return turns, turn


def _leaves_out(old: str, new: str) -> bool:
    """Whether `new` is `old` without one part of it, or `old` itself."""
    if len(new) > len(old):
        return False
    head = _first_difference(new, old)
    return head is None or old.endswith(new[head:])


def _shown(was: str, now: str) -> tuple[str, str]:
    """Both texts from a little before their first difference on, shortened."""
    start = max((_first_difference(was, now) or 0) - _SHOWN // 4, 0)
    return was[start : start + _SHOWN], now[start : start + _SHOWN]
