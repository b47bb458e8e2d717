"""The engines that are compared: ours as config overrides, the peers as they lie under a `--peers-home`."""

from __future__ import annotations

import ctypes.util
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS: Mapping[str, Sequence[str]] = {
    "dovetail auto": [],
    "dovetail q8": ["model.quantization=q8"],
    "dovetail q4": ["model.quantization=q4"],
    "dovetail int8": ["model.quantization=int8"],
    "dovetail float32": ["model.dtype=float32", "model.quantization=null"],
}
"""Our variants: name, and the overrides that make it, as `-o` takes them."""

OUR_PREFIX = "dovetail"


@dataclass(frozen=True)
class Contender:
    """One row of a table: an engine with one set of weights."""

    name: str
    engine: str
    """Key of `peers_worker.ENGINES`."""
    model: str
    python: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    """What the weights are, for quality tables."""

    @property
    def is_ours(self) -> bool:
        """Whether it is Dovetail."""
        return self.engine == OUR_PREFIX

    def missing(self) -> str | None:
        """What is not installed; None: nothing."""
        if self.is_ours:
            return None
        return next((str(path) for path in (self.python, Path(self.model)) if not path.exists()), None)


def ours(model: str, more: Sequence[str] = ()) -> list[Contender]:
    """Our variants; `more` adds some, each "NAME: key=value key=value"."""
    variants = dict(OURS)
    for text in more:
        name, colon, overrides = text.partition(":")
        if not colon:
            raise SystemExit(f"--variant {text!r}: write NAME: key=value key=value")
        variants[name.strip()] = overrides.split()
    python = Path(sys.executable)
    return [
        Contender(name, "dovetail", model, python, {"overrides": list(overrides)}, weights=" ".join(overrides))
        for name, overrides in variants.items()
    ]


def _llama_cpp(home: Path) -> list[Contender]:
    files = {
        "Q8_0": ("q8_0.gguf", "blocks of 32, int8"),
        "Q4_0": ("q4_0.gguf", "blocks of 32, int4"),
        "Q4_1": ("q4_1.gguf", "the source itself"),
    }
    python = home / "lcpp" / "bin" / "python"
    return [
        Contender(f"llama.cpp {name}", "llama.cpp", str(home / "models" / file), python, weights=weights)
        for name, (file, weights) in files.items()
    ]


def _vllm(home: Path) -> list[Contender]:
    """vLLM runs best with tcmalloc and Intel's OpenMP loaded first."""
    wanted = [ctypes.util.find_library("tcmalloc_minimal"), str(home / "vllm" / "lib" / "libiomp5.so")]
    preload = ":".join(name for name in wanted if name and (not name.startswith("/") or Path(name).exists()))
    environment = {"LD_PRELOAD": preload} if preload else {}
    python = home / "vllm" / "bin" / "python"
    return [
        Contender(
            f"vllm {dtype} {mode}",
            "vllm",
            str(home / "models" / "hf-bfloat16"),
            python,
            {"dtype": dtype, "eager": mode == "eager"},
            environment,
        )
        # float32: what a CPU without bfloat16 instructions computes at all.
        for dtype, mode in (("bfloat16", "eager"), ("bfloat16", "compiled"), ("float32", "eager"))
    ]


def _openvino(home: Path) -> Contender:
    model, python = home / "models" / "ov-int8", home / "ov" / "bin" / "python"
    return Contender("openvino int8", "openvino", str(model), python, weights="int8, a scale per output channel")


def _transformers(home: Path, dtype: str, model: str, weights: str = "") -> Contender:
    python = home / "hf" / "bin" / "python"
    options = {"dtype": dtype}
    return Contender(
        f"transformers {dtype}", "transformers", str(home / "models" / model), python, options, weights=weights
    )


def _ctranslate2(home: Path) -> Contender:
    model, python = home / "models" / "ct2-int8", home / "ct2" / "bin" / "python"
    options = {"compute_type": "int8_float32"}
    weights = "int8, a scale per output channel"
    return Contender("ctranslate2 int8", "ctranslate2", str(model), python, options, weights=weights)


def peers(home: Path) -> list[Contender]:
    """Every peer for speed."""
    return [
        *_llama_cpp(home),
        _openvino(home),
        *_vllm(home),
        _transformers(home, "bfloat16", "hf-bfloat16"),
        _transformers(home, "float32", "hf-bfloat16"),
        _ctranslate2(home),
    ]


def scoring_peers(home: Path) -> list[Contender]:
    """Peers that tell whole distributions."""
    reference = _transformers(home, "float32", "hf-float32", "the source in float32: checks the reference")
    return [*_llama_cpp(home), _openvino(home), _ctranslate2(home), reference]


def chosen(contenders: Sequence[Contender], patterns: Sequence[str]) -> list[Contender]:
    """Those whose name matches a pattern, or contains it. Exits where a pattern finds none."""
    if not patterns:
        return list(contenders)
    for pattern in patterns:
        if not any(_matches(contender, pattern) for contender in contenders):
            names = ", ".join(contender.name for contender in contenders)
            raise SystemExit(f"--only {pattern!r} matches none of {names}")
    return [c for c in contenders if any(_matches(c, pattern) for pattern in patterns)]


def _matches(contender: Contender, pattern: str) -> bool:
    return fnmatch.fnmatch(contender.name, f"*{pattern}*")
