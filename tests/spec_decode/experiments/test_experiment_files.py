"""Experiment files and data sets: what is read, and what is refused with the key or line that is at fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.datasets import load_prompts
from dovetail.spec_decode.experiments.example import EXAMPLE
from dovetail.spec_decode.experiments.schema import WorkloadSection, parse_experiment, read_experiment

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared" / "data"
ARMS: dict[str, Any] = {"lookup": {"drafter": {"name": "ngram"}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repetition": 3}, "unknown key 'repetition': did you mean 'repetitions'"),
        ({"workload": {"dta": "x"}}, "unknown key 'workload.dta': did you mean 'data'"),
        ({"arms": {"a": {"draftr": "x"}}}, "unknown key 'arms.a.draftr': did you mean 'drafter'"),
        ({"grid": {"batch_sizes": [0]}}, "grid.batch_sizes.0"),
        ({"grid": {"batch_sizes": []}}, "grid.batch_sizes"),
        ({"arms": {"plain": {}}}, "arms.plain: this arm is always there"),
        ({"arms": {}}, "arms"),
        ({"arms": {"a b": {}}}, "arms"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"order": "sequential"}, "order"),
    ],
)
def test_bad_keys_and_values_are_told(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_experiment({"arms": ARMS} | change, "e.yaml")
    assert "e.yaml" in str(error.value)
    assert words in str(error.value)


def test_a_misspelt_key_is_told_before_the_one_that_is_missing_by_it() -> None:
    with pytest.raises(ConfigError, match="unknown key 'armz': did you mean 'arms'"):
        parse_experiment({"armz": ARMS}, "e.yaml")


def test_a_bare_off_is_off() -> None:
    parsed = parse_experiment(yaml.safe_load("arms: {a: {drafter: off, config: {attention: sdpa}}}"), "e.yaml")
    assert parsed.arms["a"].drafter == "off"


def test_files_that_hold_no_experiment(tmp_path: Path) -> None:
    for text, words in (("- 1", "no mapping"), ("a: [", "malformed")):
        path = tmp_path / "e.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_experiment(path)
    with pytest.raises(ConfigError, match=r"experiment file .* does not exist"):
        read_experiment(tmp_path / "none.yaml")


def test_the_example_is_valid_and_committed() -> None:
    parsed = parse_experiment(yaml.safe_load(EXAMPLE), "example")
    assert set(parsed.arms) == {"lookup", "lookup-short", "adaptive"}
    assert (ROOT / "examples" / "experiment.yaml").read_text() == EXAMPLE


def test_our_own_set() -> None:
    data = load_prompts(WorkloadSection(), ROOT)
    categories = [prompt.category for prompt in data.prompts]
    assert {name: categories.count(name) for name in categories} == dict.fromkeys(
        ("chat", "code", "summarisation", "translation", "qa", "math"), 8
    )
    assert len({prompt.text for prompt in data.prompts}) == 48


def test_choosing_takes_categories_in_turn() -> None:
    data = load_prompts(WorkloadSection(categories=("math", "chat"), per_category=3, limit=5), ROOT)
    assert [prompt.category for prompt in data.prompts] == ["math", "chat", "math", "chat", "math"]
    other = load_prompts(WorkloadSection(categories=("math", "chat"), per_category=3, limit=4), ROOT)
    assert data.sha256 != other.sha256


def write(path: Path, lines: list[Any]) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path.name


@pytest.mark.parametrize(
    ("lines", "format", "expected"),
    [
        ([{"prompt": "a", "category": "c"}, "", {"prompt": "b"}], "prompts", [("c", "a"), ("all", "b")]),
        ([{"turns": ["a", "z"], "category": "writing"}], "spec_bench", [("writing", "a")]),
        (
            [{"turns": ["a"], "category": "writing"}, {"turns": ["b"], "category": "rag"}],
            "spec_bench",
            [("mt_bench", "a"), ("rag", "b")],
        ),
        ([{"task_id": "x/0", "entry_point": "f", "prompt": "def f"}], "humaneval", [("humaneval", "def f")]),
        ([{"question": "q?", "answer": "1"}], "gsm8k", [("gsm8k", "q?")]),
    ],
)
def test_shapes_are_told_apart(tmp_path: Path, lines: list[Any], format: str, expected: list[tuple[str, str]]) -> None:
    for name in ("set.jsonl", "set.jsonl.gz"):
        data = load_prompts(WorkloadSection(data=write(tmp_path / name, lines)), tmp_path)
        assert data.format == format
        assert [(prompt.category, prompt.text) for prompt in data.prompts] == expected


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"prompt": "a"}, "{"], ":2: no JSON"),
        ([{"prompt": "a"}, [1]], ":2: not an object"),
        ([{"prompt": "a"}, {"promt": "b"}], ":2: 'prompt' must be a text; its keys are 'promt'"),
        ([{"prompt_token_ids": [1, -2]}], "list of token ids"),
        ([{"turns": []}], "turns must be a list"),
        ([{"turns": ["a", 3]}], "turns must be a list"),
        ([], "has no prompts"),
    ],
)
def test_lines_that_cannot_be_used_are_told(tmp_path: Path, lines: list[Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_prompts(WorkloadSection(data=write(tmp_path / "set.jsonl", lines)), tmp_path)
    assert words in str(error.value)


SPEED_BENCH = {
    "question_id": "8cf4",
    "category": "coding",
    "sub_category": "python",
    "source": "https://huggingface.co/datasets/openai/openai_humaneval",
    "src_id": "HumanEval/1",
    "difficulty": "easy",
    "multiturn": False,
}
"""Columns of the data set's card (nvidia/SPEED-Bench), `turns` left out."""


def speed_bench(turns: list[str], *, prepared: bool = False, **changes: Any) -> dict[str, Any]:
    """A row as it is published, or as NeMo-Skills' prepare.py writes it."""
    messages = [{"role": "user", "content": turn} for turn in turns]
    return SPEED_BENCH | changes | ({"messages": messages} if prepared else {"turns": turns})


@pytest.mark.parametrize("prepared", [False, True])
def test_speed_bench_as_it_is_published_and_as_it_is_prepared(tmp_path: Path, prepared: bool) -> None:
    rows = [
        speed_bench(["write f"], prepared=prepared),
        speed_bench(["hello", "and then?"], prepared=prepared, category="roleplay", multiturn=True),
        speed_bench(["sort this: " + "b a " * 400], prepared=prepared, category="low_entropy"),
    ]
    name = write(tmp_path / "speed.jsonl", rows)
    data = load_prompts(WorkloadSection(data=name, turns="all"), tmp_path)
    assert data.format == "speed_bench"
    assert [(p.category, p.text, p.later_turns) for p in data.prompts] == [
        ("coding", "write f", ()),
        ("roleplay", "hello", ("and then?",)),
        ("low_entropy", rows[2]["messages"][0]["content"] if prepared else rows[2]["turns"][0], ()),
    ]
    first = load_prompts(WorkloadSection(data=name), tmp_path)
    assert (first.num_requests, data.num_requests) == (3, 4)
    assert first.sha256 != data.sha256


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            speed_bench(["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{question}"]),
            "has a placeholder here: fetch all texts",
        ),
        (SPEED_BENCH | {"messages": [{"role": "assistant", "content": "x"}]}, "a list of a user's messages"),
    ],
)
def test_rows_of_speed_bench_without_their_texts_are_refused(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_prompts(WorkloadSection(data=write(tmp_path / "speed.jsonl", [row])), tmp_path)


def test_a_parquet_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"PAR1" + bytes(12) + b"PAR1")
    with pytest.raises(ConfigError, match=r"parquet.*to_json\('test.jsonl', orient='records', lines=True\)"):
        load_prompts(WorkloadSection(data="test.parquet"), tmp_path)


def test_unknown_categories_and_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        load_prompts(WorkloadSection(categories=("maths",)), tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(WorkloadSection(data="none.jsonl"), tmp_path)


@pytest.mark.parametrize(
    ("path", "format", "count", "categories"),
    [
        ("spec_bench/question.jsonl", "spec_bench", 480, 6),
        ("mt_bench/question.jsonl", "spec_bench", 80, 8),
        ("humaneval/HumanEval.jsonl.gz", "humaneval", 164, 1),
        ("gsm8k/test.jsonl", "gsm8k", 1319, 1),
    ],
)
def test_public_sets(path: str, format: str, count: int, categories: int) -> None:
    if not (DATA / path).exists():
        pytest.skip(f"no data set {path} beside the repository")
    data = load_prompts(WorkloadSection(data=path), DATA)
    assert (data.format, len(data.prompts)) == (format, count)
    assert len({prompt.category for prompt in data.prompts}) == categories
