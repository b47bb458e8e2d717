"""Later turns of conversations: what the user says next, behind an answer that is the same in every arm.

The answers are `plain`'s, made once and untimed before the measurement. An arm's own answers would be equal where it is
greedy and lossless, and elsewhere they would make its later prompts longer, shorter or easier than those it is compared
with. So a later turn is a prompt like any other: the same tokens in every arm and repetition, computed anew on a cold
prefix cache, as Spec-Bench does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dovetail.commands.checks import require
from dovetail.commands.datasets import Prompt
from dovetail.commands.progress import Progress
from dovetail.spec_decode.experiments.admission import fits
from dovetail.spec_decode.experiments.arms import Variant
from dovetail.spec_decode.experiments.datasets import LaterTurn
from dovetail.spec_decode.experiments.run import Bench, Workload, request_seeds
from dovetail.spec_decode.experiments.schema import BASELINE

Message = dict[str, str]


@dataclass
class _Conversation:
    place: int
    """Of the latest prompt in the workload."""
    start: Prompt
    messages: list[Message]
    """Up to what the user said last."""
    token_ids: Sequence[int]


def with_later_turns(bench: Bench, workload: Workload, name: str) -> Workload:
    """The workload and, behind its prompts, the later turns of those that have some; `name` is the data set's. Raises
    `ConfigError` for a model without a chat template, and for turns that are too long unless these are left out."""
    open_ = list(_begin(bench, workload))
    if not open_:
        return workload
    require(workload.template == "chat", "workload.turns is all, which needs a chat template: write turns: first")
    prompts, token_ids, left_out = list(workload.prompts), list(workload.token_ids), workload.left_out
    model_len = bench.engines[0].config.model.max_model_len
    first_later = 1 + max(prompt.index for prompt in prompts) - len(prompts)
    turn = 0
    while open_:
        turn += 1
        answers = _answers(bench, open_, turn)
        still_open = []
        for conversation, answer in zip(open_, answers, strict=True):
            prompt, ids = _next_turn(bench, conversation, answer, turn, first_later + len(token_ids))
            if not fits(prompt, len(ids), name, bench.experiment, model_len):
                # What comes after it would lack its answer.
                left_out += len(conversation.start.later_turns) - turn + 1
                continue
            prompts.append(prompt)
            token_ids.append(ids)
            if turn < len(conversation.start.later_turns):
                conversation.place, conversation.token_ids = len(token_ids) - 1, ids
                still_open.append(conversation)
        open_ = still_open
    return replace(workload, prompts=prompts, token_ids=token_ids, left_out=left_out)


def _begin(bench: Bench, workload: Workload) -> Iterator[_Conversation]:
    system = bench.experiment.workload.system
    for place, (prompt, ids) in enumerate(zip(workload.prompts, workload.token_ids, strict=True)):
        if prompt.later_turns:
            messages = [{"role": "system", "content": system}] if system is not None else []
            yield _Conversation(place, prompt, [*messages, {"role": "user", "content": prompt.text or ""}], ids)


def _answers(bench: Bench, conversations: Sequence[_Conversation], turn: int) -> list[str]:
    """What `plain` answers, up to its end token: what an `ignore_eos` would add is no answer."""
    plain = Variant(BASELINE, None)
    tokenizer = bench.engine_of(plain).tokenizer
    assert tokenizer is not None
    batch = bench.experiment.grid.batch_sizes[0]
    answers = []
    with Progress(len(conversations)) as progress:
        for start in range(0, len(conversations), batch):
            group = conversations[start : start + batch]
            progress.show(f"answers of {BASELINE} to turn {turn}, which later turns follow")
            seeds = request_seeds(bench.experiment.sampling, [one.place for one in group], 0)
            params = [bench.params(plain, seed=seed, ignore_eos=False) for seed in seeds]
            found = bench.run(plain, [list(one.token_ids) for one in group], params)
            answers += [tokenizer.decode(one.token_ids) for one in found]
            for _ in group:
                progress.advance()
    bench.forget_finished()
    return answers


def _next_turn(
    bench: Bench, conversation: _Conversation, answer: str, turn: int, index: int
) -> tuple[LaterTurn, list[int]]:
    """The prompt and its token ids; the conversation goes on."""
    start = conversation.start
    text = start.later_turns[turn - 1]
    conversation.messages += [{"role": "assistant", "content": answer.strip()}, {"role": "user", "content": text}]
    tokenizer = bench.engines[0].tokenizer
    assert tokenizer is not None
    prompt = LaterTurn(
        index=index,
        origin=f"{start.origin}, turn {turn + 1}",
        category=start.category,
        text=text,
        turn=turn,
        conversation=start.index,
    )
    return prompt, tokenizer.chat_prompt(conversation.messages)[1]
