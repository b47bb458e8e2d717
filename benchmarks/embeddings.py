"""Embeddings per second of Dovetail beside sentence-transformers and OpenVINO: one model, one run, the same texts.

    python benchmarks/embeddings.py --model DIR [--peers-python PYTHON] [--texts 512] [--rounds 5] [--threads 2]

DIR is a folder of sentence-transformers with BERT's architecture, such as all-MiniLM-L6-v2. PYTHON is one of an
environment of the peers' own: pip install torch==2.13.0 sentence-transformers openvino. Each arm is a process that
loads the model once; the arms take turns in random order, and each round embeds all texts in one call. OpenVINO is
called directly: the model is converted from torch's, batches of 32 are sorted by length, the mean is numpy's.

The table has medians (least to most), and the median of each round's ratio to sentence-transformers. The vectors of
every arm are compared with those of sentence-transformers, by the least cosine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BATCH = 32
"""Texts of one call of OpenVINO's model, as sentence-transformers has it by default."""
ORACLE = "sentence-transformers"
Embed = Callable[[Sequence[str]], np.ndarray]


def main() -> None:
    """Runs the arms in turn and prints the table; with `--worker`, is one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--peers-python", type=Path, help="default: this one")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help=f"arms to run: {', '.join(ARMS)}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(ARMS[options.worker](options.model, options.threads))
        return
    with tempfile.TemporaryDirectory() as folder:
        print_table(*compare(options, Path(folder)))


# --- the arms --------------------------------------------------------------------------------------------------------


def dovetail(dtype: str) -> Callable[[Path, int], Embed]:
    """Ours."""

    def load(model: Path, threads: int) -> Embed:
        from dovetail import LLM

        llm = LLM(model={"path": str(model), "dtype": dtype}, executor={"name": "cpu", "threads": threads})

        def embed(texts: Sequence[str]) -> np.ndarray:
            outputs = llm.embed(list(texts), use_tqdm=False)
            return np.array([output.outputs.embedding for output in outputs], dtype=np.float32)

        return embed

    return load


def sentence_transformers(model: Path, threads: int) -> Embed:
    """The library that the model was made with."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(str(model), device="cpu")

    def embed(texts: Sequence[str]) -> np.ndarray:
        vectors: np.ndarray = loaded.encode(list(texts), batch_size=BATCH, show_progress_bar=False)
        return vectors

    return embed


def openvino(model: Path, threads: int) -> Embed:
    """OpenVINO's runtime on the CPU, in float32."""
    import openvino as ov
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    module = AutoModel.from_pretrained(model, attn_implementation="sdpa", torch_dtype=torch.float32).eval()
    example = {name: torch.ones(2, 8, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    converted = ov.convert_model(module, example_input=example)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    compiled = ov.Core().compile_model(converted, "CPU", settings)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(longest(model))
    tokenizer.enable_padding()

    def embed(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors: list[np.ndarray | None] = [None] * len(texts)
        for start in range(0, len(texts), BATCH):
            batch = order[start : start + BATCH]
            encoded = tokenizer.encode_batch([texts[index] for index in batch])
            mask = np.array([one.attention_mask for one in encoded], dtype=np.int64)
            ids = np.array([one.ids for one in encoded], dtype=np.int64)
            states = compiled({"input_ids": ids, "attention_mask": mask})[0]
            sums = (states * mask[..., None]).sum(1)
            for index, total in zip(batch, sums, strict=True):
                vectors[index] = total / np.linalg.norm(total)
        return np.array(vectors, dtype=np.float32)

    return embed


def longest(model: Path) -> int:
    """Most tokens of a text, as sentence-transformers cuts them."""
    config = json.loads((model / "sentence_bert_config.json").read_text())
    return int(config["max_seq_length"])


ARMS: dict[str, Callable[[Path, int], Embed]] = {
    "dovetail": dovetail("float32"),
    "dovetail bfloat16": dovetail("bfloat16"),
    ORACLE: sentence_transformers,
    "openvino": openvino,
}
"""By name, from the model's folder and a number of threads to a function that embeds texts."""


def work(embed: Embed) -> None:
    """Answers each line of standard input, the file of the texts and that for the vectors, with seconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    print("ready", file=answers)
    for line in sys.stdin:
        source, target = json.loads(line)
        texts = json.loads(Path(source).read_text())
        started = time.perf_counter()
        vectors = embed(texts)
        print(time.perf_counter() - started, file=answers)
        np.save(target, vectors)


# --- the comparison --------------------------------------------------------------------------------------------------


class Arm:
    """A process that embeds."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path):
        python = sys.executable if name.startswith("dovetail") else str(options.peers_python or sys.executable)
        command = [python, __file__, "--model", str(options.model), "--threads", str(options.threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "true"}
        environment["RAYON_NUM_THREADS"] = str(options.threads)
        self.name = name
        self.vectors = folder / f"{name.replace(' ', '-')}.npy"
        self._process = subprocess.Popen(
            [*command, "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()
        print(f"{name} is ready", file=sys.stderr, flush=True)

    def seconds(self, texts: Path) -> float:
        """How long it takes to embed the texts of a file."""
        assert self._process.stdin is not None
        print(json.dumps([str(texts), str(self.vectors)]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.name} ended: what it printed is above")
        return line


def repository_texts(count: int) -> list[str]:
    """Runs of 4 to 90 words of this repository's documentation: 7 to 250 tokens or so, none of which is cut."""
    pages = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    words = re.sub(r"[^A-Za-z0-9.,;:'() -]+", " ", pages).split()
    draw, texts, start = random.Random(0), [], 0
    for _ in range(count):
        length = min(90, max(4, int(draw.lognormvariate(3.0, 0.8))))
        texts.append(" ".join(words[start % len(words) :][:length]))
        start += length
    return texts


def compare(options: argparse.Namespace, folder: Path) -> tuple[dict[str, list[float]], dict[str, np.ndarray], int]:
    """Seconds of every round and the vectors of each arm, and the number of texts."""
    texts = repository_texts(options.texts)
    few, everything = folder / "few.json", folder / "texts.json"
    few.write_text(json.dumps(texts[:: max(1, len(texts) // 64)]))
    everything.write_text(json.dumps(texts))
    names = [name for name in ARMS if not options.only or name in options.only]
    arms = [Arm(name, options, folder) for name in names]
    for arm in arms:
        arm.seconds(few)  # kernels are chosen, memory is taken
    seconds: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(1)
    for _ in range(options.rounds):
        for arm in draw.sample(arms, len(arms)):
            seconds[arm.name].append(arm.seconds(everything))
            print(f"{arm.name}: {seconds[arm.name][-1]:.2f} s", file=sys.stderr, flush=True)
    for arm in arms:
        arm.close()
    return seconds, {arm.name: np.load(arm.vectors) for arm in arms}, len(texts)


def print_table(seconds: dict[str, list[float]], vectors: dict[str, Any], count: int) -> None:
    """One row per arm."""
    oracle = vectors.get(ORACLE)
    print("| | embeddings/s, median (least to most) | of sentence-transformers', median of rounds | least cosine |")
    print("| --- | --- | --- | --- |")
    for name, times in seconds.items():
        rates = sorted(count / time_ for time_ in times)
        shown, cosine = "", ""
        if oracle is not None:
            ratios = [theirs / own for theirs, own in zip(seconds[ORACLE], times, strict=True)]
            shown = f"{median(ratios):.2f}"
            lengths = np.linalg.norm(vectors[name], axis=1) * np.linalg.norm(oracle, axis=1)
            cosine = f"1 - {1 - float(((vectors[name] * oracle).sum(1) / lengths).min()):.1e}"
        print(f"| {name} | {median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f}) | {shown} | {cosine} |")


if __name__ == "__main__":
    main()
