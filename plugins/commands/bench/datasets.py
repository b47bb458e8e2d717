"""Prompts from a JSONL file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail import LLMEngine
from dovetail.commands.checks import read_text, require
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.workloads import Load


class _Line(BaseModel):
    # Data sets carry keys that are none of ours: ids, answers, categories.
    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt: str | None = None
    prompt_token_ids: list[int] | None = Field(default=None, min_length=1)
    output_tokens: int | None = Field(default=None, ge=1)


def read_dataset(path: Path, engine: LLMEngine, output_tokens: int, limit: int | None) -> Load:
    """The first `limit` lines (None: all) as a load.

    A line has "prompt" (text) or "prompt_token_ids", and may have "output_tokens" in place of the given ones. Raises
    `ConfigError` with the number of the line that cannot be used.
    """
    prompts: list[list[int]] = []
    outputs: list[int] = []
    for number, line in _lines(path):
        if limit is not None and len(prompts) == limit:
            break
        prompts.append(_tokens(line, engine, f"--dataset {path}:{number}"))
        outputs.append(line.output_tokens or output_tokens)
    require(bool(prompts), f"--dataset {path} has no prompts: give one JSON object per line")
    return Load(path.name, prompts, outputs)


def _lines(path: Path) -> Iterator[tuple[int, _Line]]:
    for number, text in enumerate(read_text("--dataset", path).splitlines(), 1):
        if not text.strip():
            continue
        try:
            yield number, _Line.model_validate_json(text)
        except ValidationError as error:
            issue = error.errors()[0]
            where = ".".join(str(part) for part in issue["loc"])
            raise ConfigError(
                f"--dataset {path}:{number}: {f'{where}: ' if where else ''}{issue['msg']}; write"
                ' {"prompt": "..."} or {"prompt_token_ids": [...]}, and perhaps "output_tokens"'
            ) from None


def _tokens(line: _Line, engine: LLMEngine, place: str) -> list[int]:
    require(
        (line.prompt is None) != (line.prompt_token_ids is None),
        f"{place}: give either prompt or prompt_token_ids",
    )
    if line.prompt_token_ids is not None:
        vocab_size = engine.config.model.vocab_size
        require(
            all(0 <= token < vocab_size for token in line.prompt_token_ids),
            f"{place}: the model has token ids 0 to {vocab_size - 1} only",
        )
        return line.prompt_token_ids
    require(engine.tokenizer is not None, f"{place} is text, and this engine has no tokenizer: give prompt_token_ids")
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode(line.prompt or "")
    require(bool(tokens), f"{place}: the prompt has no tokens")
    return tokens
