"""Which environment variables of the engine's process reach ranks on other machines.

A rank has the environment of its machine's agent, and on top of it the variables that this module chooses: those that
change what is computed or how ranks talk, which must be equal on all. What describes a machine stays that machine's
own, and no secret travels, since connections between machines are not encrypted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

SHARED: Final = (
    "DOVETAIL_*",
    "ATEN_*",
    "CUBLAS_*",
    "CUDA_LAUNCH_BLOCKING",
    "DNNL_*",
    "HF_HUB_OFFLINE",
    "MKL_*",
    "NCCL_*",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_*",
    "PYTORCH_*",
    "TORCH_*",
    "TORCHDYNAMO_*",
    "TORCHINDUCTOR_*",
    "TRANSFORMERS_OFFLINE",
    "TRITON_*",
)
"""Names, and prefixes that end in `*`, of the variables that always travel."""

OF_A_MACHINE: Final = (
    "_ADDR",
    "_DIR",
    "_FILE",
    "_HCA",
    "_HOME",
    "_HOST",
    "_IFNAME",
    "_INDEX",
    "_NUM_THREADS",
    "_PATH",
    "_PORT",
    "_RANK",
    "_ROOT",
)
"""Ends of names that a prefix does not match: paths, network interfaces, threads."""

_SECRET: Final = frozenset({"APIKEY", "AUTH", "CREDENTIAL", "KEY", "PASS", "PASSWD", "PASSWORD", "SECRET", "TOKEN"})
"""Words between underscores, in the singular, of names of secrets."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")


def checked_pattern(text: str) -> str:
    """Returns a name, or a prefix that ends in `*`, as it is. Raises `ValueError` for anything else, and for what may
    not travel."""
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is neither the name of a variable nor a prefix that ends in *, such as MYLAB_*")
    if text == "CUDA_VISIBLE_DEVICES":
        raise ValueError(f"{text} names GPUs of one machine: set it where the agent of each machine is started")
    if _is_secret(text.removesuffix("*")):
        raise ValueError(
            f"{text} looks like a secret, and connections between machines are not encrypted: set it on each machine"
        )
    return text


def variables_for_nodes(environment: Mapping[str, str], further: Iterable[str] = ()) -> dict[str, str]:
    """Returns the variables of `environment` that ranks on other machines get. `further`: patterns of the config, as
    `checked_pattern` returns them. A name that is written out travels even if it describes a machine."""
    patterns = (*SHARED, *further)
    return {
        name: value
        for name, value in environment.items()
        if not _is_secret(name) and any(_matches(name, pattern) for pattern in patterns)
    }


def _matches(name: str, pattern: str) -> bool:
    if not pattern.endswith("*"):
        return name == pattern
    return name.startswith(pattern[:-1]) and not name.endswith(OF_A_MACHINE) and name != "CUDA_VISIBLE_DEVICES"


def _is_secret(name: str) -> bool:
    return any(word in _SECRET or word.removesuffix("S") in _SECRET for word in name.upper().split("_"))
