"""What `bench serve` sends: data sets by the names that vLLM's `bench serve` has, and traces."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.commands.arrivals import read_trace
from dovetail.commands.checks import nearest, read_text, require, require_at_least
from dovetail.commands.datasets import read_prompts
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.serve.client import Ask
from dovetail.plugins.commands.bench.serve.tokens import Tokenizer, corpus_of, needed, plain_ids
from dovetail.plugins.commands.bench.workloads import cut_prompts, trace_prompts

_SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"


@dataclass(frozen=True)
class LoadOptions:
    """The options that say what to send; None where one was not given."""

    name: str
    path: Path | None
    text: Path | None
    num_prompts: int
    input_len: int | None
    output_len: int | None
    prefix_len: int | None
    range_ratio: float | None
    trace_speed: float
    max_total_tokens: int | None
    vocab_size: int | None
    seed: int

    def checked(self) -> LoadOptions:
        """Itself. Raises `ConfigError` for what cannot be, and for what this data set would ignore."""
        require(self.name in _READERS, f"--dataset-name {self.name}: {nearest(self.name, _READERS)}")
        unused = [option for option in self._given() if option not in _READERS[self.name].options]
        require(not unused, f"--dataset-name {self.name} has no use for {', '.join(unused)}: leave it out")
        needs_path = _READERS[self.name].needs_path
        require(self.path is not None or not needs_path, f"--dataset-name {self.name} needs --dataset-path FILE")
        require_at_least("--num-prompts", self.num_prompts, 1)
        require_at_least("--seed", self.seed, 0)
        for option, value, least in (
            ("--input-len", self.input_len, 1),
            ("--output-len", self.output_len, 1),
            ("--prefix-len", self.prefix_len, 0),
            ("--max-total-tokens", self.max_total_tokens, 2),
        ):
            if value is not None:
                require_at_least(option, value, least)
        ratio = self.range_ratio
        require(ratio is None or 0 <= ratio < 1, f"--range-ratio {ratio}: give 0 or more, less than 1")
        return self

    @property
    def is_trace(self) -> bool:
        """Whether the data set says when requests come."""
        return _READERS[self.name] is _TRACE

    def _given(self) -> list[str]:
        values = {
            "--dataset-path": self.path,
            "--text": self.text,
            "--input-len": self.input_len,
            "--output-len": self.output_len,
            "--prefix-len": self.prefix_len,
            "--range-ratio": self.range_ratio,
            "--trace-speed": None if self.trace_speed == 1 else self.trace_speed,
            "--max-total-tokens": self.max_total_tokens,
            "--vocab-size": self.vocab_size,
        }
        return [name for name, value in values.items() if value is not None]


@dataclass(frozen=True)
class Asks:
    """Requests of a data set."""

    asks: Sequence[Ask]
    skipped: int = 0
    """Requests that --max-total-tokens left out."""


def read_asks(options: LoadOptions, tokenizer: Tokenizer | None, count: int) -> Asks:
    """At most `count` requests; the first n of them are the same for every larger count. Raises `ConfigError`."""
    return _READERS[options.name].read(options, tokenizer, count)


def as_text(asks: Sequence[Ask], tokenizer: Tokenizer | None, why: str) -> list[Ask]:
    """The requests with prompts as text: token ids are decoded."""
    if all(isinstance(ask.prompt, str) for ask in asks):
        return list(asks)
    decode = needed(tokenizer, why).decode
    return [ask if isinstance(ask.prompt, str) else replace(ask, prompt=decode(ask.prompt)) for ask in asks]


def _random(options: LoadOptions, tokenizer: Tokenizer | None, count: int) -> Asks:
    ids = plain_ids(tokenizer, options.vocab_size)
    draw = random.Random(options.seed)
    prefix = tuple(draw.choices(ids, k=options.prefix_len or 0))
    ratio = options.range_ratio or 0.0
    asks = []
    for _ in range(count):
        size, limit = (_spread(draw, n, ratio) for n in (options.input_len or 1024, options.output_len or 128))
        asks.append(Ask(prefix + tuple(draw.choices(ids, k=size)), limit))
    return Asks(asks)


def _spread(draw: random.Random, middle: int, ratio: float) -> int:
    return draw.randint(max(1, int(middle * (1 - ratio))), int(middle * (1 + ratio)))


def _text(options: LoadOptions, tokenizer: Tokenizer | None, count: int) -> Asks:
    corpus = corpus_of(options.path, tokenizer, options.vocab_size, options.seed)
    lengths = [options.prefix_len or 0, *[options.input_len or 128] * count]
    prefix, *rest = cut_prompts(lengths, corpus, options.seed)
    return Asks([Ask(tuple(prefix + tokens), options.output_len or 128) for tokens in rest])


def _sonnet(options: LoadOptions, tokenizer: Tokenizer | None, count: int) -> Asks:
    """As in vLLM: a task, the same first lines in all prompts, then lines drawn from the poems."""
    encode = needed(tokenizer, "sonnet: a prompt of a given length").encode
    assert options.path is not None
    text = read_text("--dataset-path", options.path)
    lines = [line.strip() + "\n" for line in text.splitlines() if line.strip()]
    require(bool(lines), f"--dataset-path {options.path} has no lines")
    size = sum(len(encode(line)) for line in lines) / len(lines)
    task, prefix_len = len(encode(_SONNET_TASK)), 200 if options.prefix_len is None else options.prefix_len
    total = round(((options.input_len or 550) - task) / size)
    shared = max(0, round((prefix_len - task) / size))
    require(
        total > shared, f"--input-len {options.input_len or 550} is no longer than --prefix-len {prefix_len}: give more"
    )
    draw = random.Random(options.seed)
    first = (lines * (shared // len(lines) + 1))[:shared]
    prompts = [_SONNET_TASK + "".join(first + draw.choices(lines, k=total - shared)) for _ in range(count)]
    return Asks([Ask(prompt, options.output_len or 150) for prompt in prompts])


def _custom(options: LoadOptions, tokenizer: Tokenizer | None, count: int) -> Asks:
    assert options.path is not None
    _, prompts = read_prompts("--dataset-path", options.path)
    default = options.output_len or 128
    return Asks([Ask(p.token_ids or p.text or "", p.output_tokens or default) for p in prompts[:count]])


def _sharegpt(options: LoadOptions, tokenizer: Tokenizer | None, count: int) -> Asks:
    """First turns of conversations of two turns or more; as many output tokens as the first answer has."""
    assert options.path is not None
    found = list(_conversations(options.path))
    random.Random(options.seed).shuffle(found)
    asks = []
    for question, answer in found[:count]:
        limit = options.output_len
        if limit is None:
            limit = max(1, len(needed(tokenizer, "sharegpt without --output-len").encode(answer)))
        asks.append(Ask(question, limit))
    return Asks(asks)


def _conversations(path: Path) -> list[tuple[str, str]]:
    origin = f"--dataset-path {path}"
    try:
        data = json.loads(read_text("--dataset-path", path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin} is no JSON ({error}); give ShareGPT's list of conversations") from None
    require(isinstance(data, list), f"{origin} is no list: give ShareGPT's list of conversations")
    found = []
    for number, item in enumerate(data):
        turns = item.get("conversations", item.get("conversation")) if isinstance(item, Mapping) else None
        if not isinstance(turns, list):
            raise ConfigError(f'{origin}: item {number} has no list "conversations"')
        texts = [turn.get("value") for turn in turns[:2] if isinstance(turn, Mapping)]
        said = [text for text in texts if isinstance(text, str) and text]
        if len(said) == 2:
            found.append((said[0], said[1]))
    require(bool(found), f"{origin} has no conversation of two turns")
    return found


def _trace(options: LoadOptions, tokenizer: Tokenizer | None, count: int) -> Asks:
    assert options.path is not None
    limit = options.max_total_tokens
    requests = read_trace(options.path, speed=options.trace_speed, option="--dataset-path")
    fitting = [r for r in requests if limit is None or r.input_tokens + r.output_tokens <= limit]
    require(bool(fitting), f"--dataset-path {options.path}: no request has up to {limit} tokens; give more")
    chosen = fitting[:count]
    corpus = corpus_of(options.text, tokenizer, options.vocab_size, options.seed)
    prompts = trace_prompts(chosen, corpus, options.seed)
    first = chosen[0].arrival
    asks = [Ask(tuple(p), r.output_tokens, r.arrival - first) for p, r in zip(prompts, chosen, strict=True)]
    # Counted up to the last request that was taken.
    last = requests.index(chosen[-1]) + 1
    return Asks(asks, last - len(chosen))


@dataclass(frozen=True)
class _Reader:
    read: Callable[[LoadOptions, Tokenizer | None, int], Asks]
    options: frozenset[str]
    needs_path: bool = False


_SIZES = frozenset({"--input-len", "--output-len", "--prefix-len"})
_TRACE = _Reader(
    _trace,
    frozenset({"--dataset-path", "--text", "--trace-speed", "--max-total-tokens", "--vocab-size"}),
    needs_path=True,
)
_READERS: Mapping[str, _Reader] = {
    "random": _Reader(_random, _SIZES | {"--range-ratio", "--vocab-size"}),
    "text": _Reader(_text, _SIZES | {"--dataset-path", "--vocab-size"}),
    "sonnet": _Reader(_sonnet, _SIZES | {"--dataset-path"}, needs_path=True),
    "sharegpt": _Reader(_sharegpt, frozenset({"--dataset-path", "--output-len"}), needs_path=True),
    "custom": _Reader(_custom, frozenset({"--dataset-path", "--output-len"}), needs_path=True),
    "trace": _TRACE,
    "azure": _TRACE,
    "mooncake": _TRACE,
}
DATASETS = tuple(_READERS)


def describe_asks(asks: Sequence[Ask]) -> dict[str, Any]:
    """What has to be equal for two results to be of the same workload."""
    digest = hashlib.sha256(repr([ask.prompt for ask in asks]).encode()).hexdigest()[:16]
    outputs = [ask.output_tokens for ask in asks]
    return {
        "requests": len(asks),
        "output_tokens": outputs[0] if min(outputs) == max(outputs) else [min(outputs), max(outputs)],
        "prompts_sha256": digest,
    }
