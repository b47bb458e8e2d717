"""Whether structured outputs of a real server are valid: JSON schemas through OpenAI's client, checked by jsonschema.

    python benchmarks/structured/validity.py [--grammars llguidance xgrammar] [--drawn 60] [--max-tokens 120]
        [--test-suite JSON-Schema-Test-Suite] [--log server.log]

Each schema of schemas.py, and `--drawn` random ones, is sent as a strict `response_format` to /v1/chat/completions of
the default model, greedily and at temperature 1, without drafts, with drafts of `ngram` and with forced tokens as
drafts. Answers that ended by "stop" must be valid: the exit code is 1 where one is not. With a checkout of
github.com/json-schema-org/JSON-Schema-Test-Suite its schemas of draft 2020-12 are sent too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.structured.schemas import HAND_MADE, Schema, drawn
from benchmarks.structured.serving import DRAFTERS, serving

_AT_ONCE = 16
_TOO_LONG = 1500
"""Characters of a schema that a prompt shows."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came for one schema."""

    name: str
    temperature: float
    drafter: str
    ending: str
    """"stop", "length", "refused" (400), or another status."""
    text: str
    """The content, or the message of the error."""
    num_tokens: int = 0
    fault: str = ""
    """Why the content does not fit the schema; empty where it does, and where it did not end by "stop"."""


def of_test_suite(folder: Path) -> dict[str, Schema]:
    """The schemas of draft 2020-12 that are objects."""
    found = {}
    for path in sorted(folder.glob("tests/draft2020-12/*.json")):
        for index, group in enumerate(json.loads(path.read_text())):
            if isinstance(group["schema"], dict):
                found[f"suite {path.stem} {index}"] = group["schema"]
    return found


async def ask(
    client: openai.AsyncOpenAI, name: str, schema: Schema, *, temperature: float, drafter: str, max_tokens: int
) -> Answer:
    """One request."""
    facts: dict[str, Any] = {"name": name, "temperature": temperature, "drafter": drafter}
    prompt = f"Write an example of JSON that fits this schema.\n{json.dumps(schema, ensure_ascii=False)[:_TOO_LONG]}"
    try:
        answer = await client.chat.completions.create(
            model="served",
            messages=[{"role": "user", "content": prompt}],
            temperature=temperature,
            seed=1,
            max_tokens=max_tokens,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
            extra_body={"speculation": drafter},
        )
    except openai.APIStatusError as error:
        ending = "refused" if error.status_code == 400 else str(error.status_code)
        return Answer(**facts, ending=ending, text=error.message)
    choice, usage = answer.choices[0], answer.usage
    text = choice.message.content or ""
    fault = fault_of(text, schema) if choice.finish_reason == "stop" else ""
    assert usage is not None
    return Answer(**facts, ending=choice.finish_reason, text=text, num_tokens=usage.completion_tokens, fault=fault)


def fault_of(text: str, schema: Schema) -> str:
    """Empty for a text that is JSON and fits the schema, `format` included."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for error in jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(value):
        return str(error.message)
    return ""


async def ask_all(url: str, schemas: dict[str, Schema], max_tokens: int) -> list[Answer]:
    """Each schema in each arm."""
    limit = asyncio.Semaphore(_AT_ONCE)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def one(name: str, drafter: str, temperature: float) -> Answer:
            async with limit:
                return await ask(
                    client, name, schemas[name], temperature=temperature, drafter=drafter, max_tokens=max_tokens
                )

        arms = [(drafter, temperature) for drafter in ("off", *DRAFTERS) for temperature in (0.0, 1.0)]
        return await asyncio.gather(*(one(name, *arm) for name in schemas for arm in arms))


def report(grammar: str, answers: Sequence[Answer]) -> None:
    """Rows of the table, then refusals by reason and every fault."""
    for drafter in ("off", *DRAFTERS):
        for temperature in (0.0, 1.0):
            of_arm = [a for a in answers if (a.drafter, a.temperature) == (drafter, temperature)]
            endings = Counter(answer.ending for answer in of_arm)
            others = sum(endings.values()) - endings["stop"] - endings["length"] - endings["refused"]
            num_faults = sum(bool(answer.fault) for answer in of_arm)
            tokens = sum(answer.num_tokens for answer in of_arm)
            print(
                f"| `{grammar}` | {drafter} | {temperature:g} | {len(of_arm)} | {endings['stop']} | {num_faults} |"
                f" {endings['length']} | {endings['refused']} | {others} | {tokens:,} |"
            )
    reasons = Counter(
        re.sub(r"#[^:]*|'[^']*'|\d+", "..", answer.text) for answer in answers if answer.ending == "refused"
    )
    for reason, count in reasons.most_common():
        print(f"  refused {count} times: {reason}")
    for name in sorted({answer.name for answer in answers if answer.ending == "refused"}):
        print(f"  refused: {name}")
    for answer in answers:
        if answer.fault or answer.ending not in ("stop", "length", "refused"):
            print(f"  FAULT: {answer}")


def main() -> int:
    """Prints the tables; 1 where an answer is invalid, or there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grammars", nargs="+", default=["llguidance", "xgrammar"])
    parser.add_argument("--drawn", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--test-suite", type=Path)
    parser.add_argument("--log", type=Path, default=Path("server.log"))
    given = parser.parse_args()
    schemas = {**HAND_MADE, **dict(drawn(given.drawn, given.seed))}
    if given.test_suite is not None:
        schemas |= of_test_suite(given.test_suite)
    packages = ("openai", "jsonschema", *given.grammars)
    print(f"{len(schemas)} schemas; " + ", ".join(f"{name} {version(name)}" for name in packages))
    print("| grammar | drafts | temperature | asked | stop | invalid | length | refused | other | tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    is_sound = True
    for grammar in given.grammars:
        with serving(grammar=grammar, threads=given.threads, log=given.log) as url:
            answers = asyncio.run(ask_all(url, schemas, given.max_tokens))
        report(grammar, answers)
        is_sound &= all(not a.fault and a.ending in ("stop", "length", "refused") for a in answers)
    return 0 if is_sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
