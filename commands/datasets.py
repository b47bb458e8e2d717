"""Prompts of a data set: JSON lines in the shapes of public sets, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dovetail.commands.checks import require
from dovetail.contracts.errors import ConfigError

Shape = Literal["prompts", "spec_bench", "humaneval", "gsm8k"]

_PARQUET_MAGIC = b"PAR1"
_SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Begins the turns of SPEED-Bench whose texts NVIDIA may not hand on."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a data set: its text, or its token ids."""

    index: int
    """Its position in the data set, counted from 0."""
    origin: str
    """File and line, for messages."""
    category: str = "all"
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    output_tokens: int | None = None
    """Tokens to generate; None where the line does not say."""
    later_turns: tuple[str, ...] = ()
    """What the user says after the answer to `text`, after the answer to that, and so on."""
    sub_category: str | None = None
    """Of SPEED-Bench, which alone has them."""
    prediction: str | tuple[int, ...] | None = None
    """What the answer will be for the most part, as text or token ids (`SamplingParams.prediction`)."""


def read_prompts(option: str, path: Path, shape: Shape | Literal["auto"] = "auto") -> tuple[Shape, list[Prompt]]:
    """Returns the shape and the prompts of a file that an option names.

    Shape "auto" depends on the keys of the first line: "turns" (Spec-Bench, MT-Bench, SPEED-Bench; or "messages" with
    "sub_category", as SPEED-Bench is prepared), "task_id" and "entry_point" (HumanEval), "question" (GSM8K), else
    plain: "prompt" or "prompt_token_ids", with "category" and "output_tokens" where a line has them. Lines of any shape
    may have a "prediction". Raises `ConfigError` with the line that cannot be used.
    """
    try:
        raw = path.read_bytes()
        require(
            not raw.startswith(_PARQUET_MAGIC),
            f"{option} {path} is a parquet file; give JSON lines, which pyarrow writes:"
            f" pandas.read_parquet({path.name!r}).to_json({path.stem + '.jsonl'!r}, orient='records', lines=True)",
        )
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{option} {path}: cannot be read ({reason}); give a JSONL file") from None
    return parse_prompts(text, f"{option} {path}", shape)


def parse_prompts(text: str, origin: str, shape: Shape | Literal["auto"] = "auto") -> tuple[Shape, list[Prompt]]:
    """Does what `read_prompts` does, for the text of a file; `origin` names the file in messages."""
    records = list(_records(text, origin))
    require(bool(records), f"{origin} has no prompts: give one JSON object per line")
    found = _shape_of(records[0][1]) if shape == "auto" else shape
    parse = _SHAPES[found]
    return found, [
        replace(parse(index, record, f"{origin}:{line}"), prediction=_prediction(record, f"{origin}:{line}"))
        for index, (line, record) in enumerate(records)
    ]


def _records(text: str, origin: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{origin}:{number}: no JSON ({error.msg}); give one object per line") from None
        except RecursionError:
            raise ConfigError(f"{origin}:{number}: nested too deeply; give one flat object per line") from None
        require(isinstance(record, Mapping), f"{origin}:{number}: not an object; give one JSON object per line")
        yield number, record


def _shape_of(record: Mapping[str, Any]) -> Shape:
    """Returns the shape of a file by the keys of its first line."""
    if "turns" in record or ("messages" in record and "sub_category" in record):
        return "spec_bench"
    if "task_id" in record and "entry_point" in record:
        return "humaneval"
    return "gsm8k" if "question" in record and "prompt" not in record else "prompts"


def _text(record: Mapping[str, Any], key: str, origin: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{origin}: {key!r} must be a text; its keys are {', '.join(map(repr, record)) or 'none'}")
    return value


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_count(token, 0) for token in value)


def _prediction(record: Mapping[str, Any], origin: str) -> str | tuple[int, ...] | None:
    value = record.get("prediction")
    if value is None or (isinstance(value, str) and value):
        return value
    require(_are_token_ids(value), f"{origin}: prediction must be a text or a list of token ids, got {value!r:.40}")
    return tuple(value)


def _plain(index: int, record: Mapping[str, Any], origin: str) -> Prompt:
    category, count = record.get("category", "all"), record.get("output_tokens")
    require(isinstance(category, str), f"{origin}: category must be a text, got {category!r}")
    require(count is None or _is_count(count, 1), f"{origin}: output_tokens must be 1 or more, got {count!r}")
    ids = record.get("prompt_token_ids")
    if ids is None:
        text = _text(record, "prompt", origin)
        return Prompt(index=index, origin=origin, category=category, text=text, output_tokens=count)
    require(record.get("prompt") is None, f"{origin}: give either prompt or prompt_token_ids")
    require(_are_token_ids(ids), f"{origin}: prompt_token_ids must be a list of token ids")
    return Prompt(index=index, origin=origin, category=category, token_ids=tuple(ids), output_tokens=count)


def _spec_bench(index: int, record: Mapping[str, Any], origin: str) -> Prompt:
    turns = record.get("turns")
    if turns is None and "messages" in record:
        turns = _messages_of_user(record["messages"], origin)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f"{origin}: turns must be a list of texts, one for each time that the user speaks")
    require(
        not any(text.startswith(_SPEED_BENCH_PLACEHOLDER) for text in turns),
        f"{origin}: the text of this prompt is not in the published set, which has a placeholder here: fetch all texts"
        " with NVIDIA's specdec_bench or NeMo-Skills (dataset/speed-bench/prepare.py), and give their file",
    )
    sub_category = record.get("sub_category")
    return Prompt(
        index=index,
        origin=origin,
        category=str(record.get("category", "all")),
        text=turns[0],
        later_turns=tuple(turns[1:]),
        sub_category=None if sub_category is None else str(sub_category),
    )


def _messages_of_user(messages: Any, origin: str) -> list[Any]:
    """The published rows of SPEED-Bench have `turns`; NeMo-Skills' prepare.py, which fetches the missing texts, writes
    `messages` in their place."""
    is_user = isinstance(messages, list) and all(
        isinstance(message, Mapping) and message.get("role") == "user" for message in messages
    )
    require(is_user, f"{origin}: messages must be a list of a user's messages, as SPEED-Bench's prepare.py writes")
    return [message.get("content") for message in messages]


def _humaneval(index: int, record: Mapping[str, Any], origin: str) -> Prompt:
    return Prompt(index=index, origin=origin, category="humaneval", text=_text(record, "prompt", origin))


def _gsm8k(index: int, record: Mapping[str, Any], origin: str) -> Prompt:
    return Prompt(index=index, origin=origin, category="gsm8k", text=_text(record, "question", origin))


_SHAPES: Mapping[Shape, Callable[[int, Mapping[str, Any], str], Prompt]] = {
    "prompts": _plain,
    "spec_bench": _spec_bench,
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
}


__all__ = ["Prompt", "Shape", "parse_prompts", "read_prompts"]
