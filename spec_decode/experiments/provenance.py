"""What a report was made of and on: enough to make it again, and to know what it may be compared with."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from dovetail import LLMEngine
from dovetail.commands import ResolvedConfig
from dovetail.commands.machine import NOISE_LIMIT, describe_machine, noise_warning
from dovetail.spec_decode.experiments.arms import Setup, effective_values
from dovetail.spec_decode.experiments.datasets import DataSet, LaterTurn
from dovetail.spec_decode.experiments.measuring import Extent, Measured
from dovetail.spec_decode.experiments.run import Bench, Workload
from dovetail.spec_decode.experiments.schema import Experiment

_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class EngineFacts:
    """One engine, as it ran."""

    variants: Sequence[str]
    config_sha256: str
    plugin_hash: str
    plugins: Mapping[str, str]
    """Kind (and drafter) -> name, distribution and version."""
    attention: str
    kv_blocks: int
    """KV blocks of the engine while its drafters are loaded."""
    kv_block_tokens: int
    kv_tokens_estimated: int | None
    """Tokens of KV memory by the estimate that `dovetail explain` makes; None where it does not say."""
    kv_tokens_estimated_without_drafters: int | None
    """Of the same engine with no drafter: what is missing above is the drafters'."""
    weight_bytes: int | None
    """Estimated from the checkpoint."""
    resident_bytes: int
    """Of this process after the engine was made: host memory."""


@dataclass(frozen=True)
class Provenance:
    """The header of a report."""

    name: str
    date: str
    """ISO 8601, UTC."""
    experiment: Mapping[str, Any]
    experiment_sha256: str
    """Of the experiment with every default filled in."""
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    machine: Mapping[str, Any]
    threads: int
    seeds: Mapping[str, int]
    engines: Sequence[EngineFacts]
    arms: Mapping[str, Mapping[str, Any]]
    """Each arm's resolved config, flat, its drafter under speculative.drafter."""
    differences: Mapping[str, Mapping[str, Any]]
    """Key -> arm -> value, where arms differ."""
    undeclared: Sequence[str]
    notes: Sequence[str]
    extent: Extent
    noise: str | None
    """What else took the machine while it was measured; None where nothing did."""


def describe(
    experiment: Experiment,
    setup: Setup,
    bench: Bench,
    data: DataSet,
    workload: Workload,
    resident: Sequence[int],
    measured: Measured,
) -> Provenance:
    """Gathers the header."""
    plain = experiment.model_dump(mode="json")
    first = bench.engines[0]
    return Provenance(
        name=experiment.name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        experiment=plain,
        experiment_sha256=sha256_of(plain),
        model=describe_model(first.config),
        workload=_describe_workload(experiment, data, workload),
        machine=_describe_machine(first),
        threads=torch.get_num_threads(),
        seeds={
            "experiment": experiment.seed,
            "sampling": experiment.sampling.seed,
            "model": first.config.model.seed,
        },
        engines=[_describe_engine(setup, bench, index, resident[index]) for index in range(len(bench.engines))],
        arms={name: effective_values(arm) for name, arm in setup.arms.items()},
        differences={line.key: dict(line.values) for line in setup.differences},
        undeclared=list(setup.undeclared),
        notes=[*setup.notes, *_dropped(workload), *_extent_notes(measured.extent)],
        extent=measured.extent,
        noise=noise_warning(measured.spans),
    )


def sha256_of(data: Any) -> str:
    """Of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def _dropped(workload: Workload) -> list[str]:
    return [f"{workload.left_out} prompts were too long for the model and left out."] if workload.left_out else []


def _extent_notes(extent: Extent) -> Iterator[str]:
    if extent.sessions > 1:
        yield (
            f"Measured by {extent.sessions} processes, one after the other. Adaptive lengths and drafters that remember"
            " finished requests began anew in each."
        )
    if extent.disturbed:
        yield (
            f"Other processes took more than {NOISE_LIMIT:.0%} of the machine in some turn of"
            f" {extent.disturbed} of {extent.rounds} rounds. {extent.run_again} ran again, all arms, and of both times"
            " the less disturbed counts."
        )
    if extent.decided is not None:
        yield (
            "Run until decided: each group once, speed-ups looked at after every round. Intervals and p-values of"
            " speed hold at whatever group it ended."
        )


def _describe_workload(experiment: Experiment, data: DataSet, workload: Workload) -> dict[str, Any]:
    categories: dict[str, int] = {}
    for prompt in workload.prompts:
        categories[prompt.category] = categories.get(prompt.category, 0) + 1
    lengths = sorted(len(ids) for ids in workload.token_ids)
    later = [
        list(ids)
        for prompt, ids in zip(workload.prompts, workload.token_ids, strict=True)
        if isinstance(prompt, LaterTurn)
    ]
    return {
        "data": data.name,
        "format": data.format,
        # Later turns follow answers, which another engine may give otherwise.
        "sha256": sha256_of([data.sha256, later]) if later else data.sha256,
        "later_turns": len(later),
        "token_ids_sha256": sha256_of([list(ids) for ids in workload.token_ids]),
        "prompts": len(workload.prompts),
        "categories": categories,
        "template": workload.template,
        "prompt_tokens": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]},
        "left_out": workload.left_out,
        # Reports of sets without any stay comparable with older ones.
        **({"predictions": len(workload.predictions)} if workload.predictions else {}),
    }


def describe_model(config: ResolvedConfig) -> dict[str, Any]:
    """What distinguishes a model; of its files the sizes, and the first and last megabyte of each."""
    model = config.model
    place = model.files.path
    files = [place] if place.is_file() else sorted(p for p in place.iterdir() if p.is_file() and p.name[0] != ".")
    return {
        "path": config.values["model"]["path"],
        "revision": config.values["model"].get("revision"),
        "dtype": model.dtype,
        "quantization": config.quantization.name if config.quantization is not None else None,
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        "files": {path.name: path.stat().st_size for path in files},
        "sampled_sha256": _identity(files),
    }


def _identity(files: Sequence[Path]) -> str:
    """Of each file's size, first and last megabyte: distinguishes revisions without reading all weights."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _describe_machine(engine: LLMEngine) -> dict[str, Any]:
    found = describe_machine()
    frequency = psutil.cpu_freq()
    found["cpu_mhz"] = None if frequency is None else round(frequency.current)
    found["clocks"] = _describe_clocks()
    found["device"] = engine.config.device_type
    if engine.config.device_type == "cuda":
        found["device"] = torch.cuda.get_device_name()
    return found


def _describe_clocks() -> dict[str, Any]:
    """What times are measured by, and what may change the speed of the CPU meanwhile; None where it is not known."""
    timer, frequency = time.get_clock_info("monotonic"), psutil.cpu_freq()
    return {
        "timer": f"{timer.implementation}, resolution {timer.resolution:.0e} s",
        "source": _first_line("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "highest MHz": round(frequency.max) if frequency is not None and frequency.max else None,
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _describe_engine(setup: Setup, bench: Bench, index: int, resident: int) -> EngineFacts:
    plan, engine = setup.engines[index], bench.engines[index]
    config = engine.config
    plugins: dict[str, list[str]] = {}
    for component in config.components():
        source = f" ({component.distribution} {component.version})" if component.distribution else ""
        plugins.setdefault(component.kind, []).append(f"{component.name}{source}")
    estimate = plan.explanation.estimate
    return EngineFacts(
        variants=[variant.label for variant in plan.variants],
        config_sha256=sha256_of(dict(config.values)),
        plugin_hash=config.plugin_hash,
        plugins={kind: ", ".join(dict.fromkeys(names)) for kind, names in plugins.items()},
        attention=config.attention.name,
        kv_blocks=engine.cache_statistics().num_blocks,
        kv_block_tokens=config.cache.block_size,
        kv_tokens_estimated=estimate.kv_tokens if estimate is not None else None,
        kv_tokens_estimated_without_drafters=plan.kv_tokens_alone,
        weight_bytes=estimate.weight_bytes if estimate is not None else None,
        resident_bytes=resident,
    )
