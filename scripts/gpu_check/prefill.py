"""Prefill: floating-point operations per second against those of a measured matrix product."""

from __future__ import annotations

import time
from typing import Any

from common import Arguments, Report, engine_sections, matmul_rate, model_config, random_model, run
from steps import Stepper


def prompt_flops(config: dict[str, Any], tokens: int) -> float:
    """Two operations per weight and token, the output layer for the last token only, and causal attention."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * inner
    attention = 2 * queries * tokens * tokens  # QK and PV, half of each hidden by causality
    return config["num_hidden_layers"] * (2.0 * layer * tokens + attention) + 2.0 * config["vocab_size"] * hidden


def body(report: Report, arguments: Arguments) -> None:
    """One prompt of each length, in one step."""
    rate = matmul_rate(arguments)
    report.add("matrix product", rate / 1e12, "TFLOP/s")
    lengths = (32, 128) if arguments.null else (2048, 16384)
    with random_model(arguments) as directory:
        sections = engine_sections(arguments, directory, cuda_graphs="off")
        sections["scheduler"]["max_num_batched_tokens"] = max(lengths)
        stepper = Stepper(arguments, directory, sections)
        for length in lengths:
            seconds = []
            for _ in range(4):
                requests = stepper.requests(1, 0, length, length + 1)
                started = time.perf_counter()
                stepper.executor.execute(stepper.plan(requests, length)).result()
                seconds.append(time.perf_counter() - started)
            best = sorted(seconds[1:])[1]
            achieved = prompt_flops(model_config(arguments), length) / best
            report.add(f"prompt of {length}", 1e3 * best, "ms")
            report.add(f"prompt of {length}: rate", achieved / 1e12, "TFLOP/s")
            share = achieved / rate
            report.add(
                f"prompt of {length}: share of the matrix product", share, goal="at least 0.6", good=share >= 0.6
            )
        stepper.close()


if __name__ == "__main__":
    run("prefill", body)
