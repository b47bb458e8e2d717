"""Decode: tokens per second against the roofline: bytes that must move over the measured copy bandwidth."""

from __future__ import annotations

import gc
from pathlib import Path
from statistics import median
from typing import Any

from common import Arguments, Report, copy_bandwidth, engine_sections, model_config, random_model, run
from steps import Stepper


def step_bytes(config: dict[str, Any], itemsize: int, requests: int, context: int) -> int:
    """Weights once (of the embedding only the rows that are looked up), and the keys and values of every request."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    cache = 2 * config["num_hidden_layers"] * keys * context * requests
    return itemsize * (weights + cache)


def body(report: Report, arguments: Arguments) -> None:
    """Each batch and context that the KV cache holds."""
    bandwidth = copy_bandwidth(arguments)
    report.add("copy within the device", bandwidth / 1e9, "GB/s")
    config = model_config(arguments)
    with random_model(arguments) as directory:
        stepper = Stepper(arguments, directory)
        report.add("loading", stepper.load_s, "s")
        captured = stepper.capture_s
        report.add("KV memory and captured graphs", captured, "s", goal="under 20 s", good=captured < 20)
        report.add("KV cache", stepper.capacity, "tokens")
        batches = (1, 4) if arguments.null else (1, 8, 64, 256)
        contexts = (64, 256) if arguments.null else (1024, 8192)
        for context in contexts:
            for batch in batches:
                measure(
                    report,
                    arguments,
                    stepper,
                    batch,
                    context,
                    step_bytes(config, arguments.dtype.itemsize, batch, context) / bandwidth,
                )
        stepper.close()
        del stepper
        gc.collect()
        for method in () if arguments.null else ("fp8", "w8a8", "int8"):
            measure_quantized(report, arguments, directory, method)


def measure_quantized(report: Report, arguments: Arguments, directory: Path, method: str) -> None:
    """Steps with rounded weights, but for the output layer."""
    sections = engine_sections(arguments, directory)
    sections["model"]["quantization"] = method
    stepper = Stepper(arguments, directory, sections)
    for batch in (1, 64):
        seconds, _, _ = stepper.decode_seconds(batch, 1024, 48)
        report.add(f"{method}, batch {batch}, context 1024: speed", batch / seconds, "tokens/s")
    stepper.close()


def measure(report: Report, arguments: Arguments, stepper: Stepper, batch: int, context: int, roofline: float) -> None:
    """One batch at one context. `roofline`: seconds per step."""
    what = f"batch {batch}, context {context}"
    num_steps = 8 if arguments.null else 48
    if batch * (context + num_steps + 32) > stepper.capacity:
        report.add(f"{what}: not run, more than the KV cache holds", batch * context, "tokens")
        return
    seconds, busy, gaps = stepper.decode_seconds(batch, context, num_steps)
    report.add(f"{what}: speed", batch / seconds, "tokens/s")
    share = roofline / seconds
    goal = "at least 0.85" if batch == 1 else ""
    report.add(f"{what}: share of the roofline", share, goal=goal, good=share >= 0.85 if goal else None)
    report.add(f"{what}: device busy per step", 1e3 * median(busy), "ms")
    gap = 1e3 * median(gaps)
    goal = "under 0.3 ms" if batch == 256 else ""
    report.add(f"{what}: device idle between steps", gap, "ms", goal=goal, good=gap < 0.3 if goal else None)


if __name__ == "__main__":
    run("decode", body)
