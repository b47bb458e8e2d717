"""What must be alike on all machines of one engine: plugins by distribution, model files, instruction sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dovetail.config.resolved import ResolvedConfig
from dovetail.registry.bootstrap import installed_code
from dovetail.worker.machine.environment import cpu_features

_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 16
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class MachineFacts:
    """What is on one machine."""

    plugins: dict[str, tuple[str | None, str]]
    """By distribution, or reference of a local file or module: version, and a hash of its files."""
    models: dict[str, dict[str, str]]
    """By path, a mark of each file (see `file_mark`); empty where there is none."""
    cpu_features: frozenset[str]


def machine_facts(config: ResolvedConfig) -> MachineFacts:
    """Reads this machine. Imports no plugin and no torch."""
    code = installed_code(config.components())
    plugins = {owner: (version, found.digest if found.files else "") for owner, (version, found) in code.items()}
    models = {str(path): _marks(path) for path in _model_paths(config)}
    info = _CPUINFO.read_text() if _CPUINFO.is_file() else ""
    return MachineFacts(plugins, models, cpu_features(info))


def differences(mine: MachineFacts, theirs: MachineFacts, device_type: str) -> list[str]:
    """Returns a sentence for each thing that another machine lacks, or has otherwise."""
    reasons = []
    for owner, (version, digest) in mine.plugins.items():
        their_version, their_digest = theirs.plugins[owner]
        if not their_digest:
            reasons.append(
                f'{owner} is not there: pip install "{owner}=={version}"' if version else f"{owner} is not there"
            )
        elif version != their_version:
            reasons.append(f"{owner} {their_version} is there, and {version} here: install the same version")
        elif digest != their_digest:
            shown = f"{owner} {version or ''}".strip()
            reasons.append(f"{shown} has other files there ({their_digest[:12]}, here {digest[:12]}): install it anew")
    for path, marks in mine.models.items():
        reasons += _model_differences(path, marks, theirs.models[path])
    missing = sorted(mine.cpu_features - theirs.cpu_features) if device_type == "cpu" else []
    lacking = [name for name in missing if name.startswith(("avx", "amx", "sve", "asimd", "fma", "f16c"))]
    if lacking:
        reasons.append(
            f"its processor lacks {', '.join(lacking)}, for which kernels were chosen here: run the engine on a machine"
            " with the same processor"
        )
    return reasons


def file_mark(path: Path) -> str:
    """Returns the size of a file, and a hash of 16 equal steps' first 64 KiB and of its last 64 KiB: of the whole file
    where it is smaller than 1 MiB. Equal marks of large files do not prove equal files; another checkpoint, a file that
    was torn off, or another quantization is seen."""
    size = path.stat().st_size
    step = max(size // _NUM_SAMPLES, _SAMPLE_BYTES)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in (*range(0, size, step), max(0, size - _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def _model_differences(path: str, mine: dict[str, str], theirs: dict[str, str]) -> Iterator[str]:
    if not theirs:
        yield f"the model {path} is not there: copy it to the same path"
        return
    other = [name for name in mine if mine[name] != theirs.get(name)]
    if other:
        first = other[0]
        found = theirs.get(first, "no such file")
        more = f", and {len(other) - 1} files more" if len(other) > 1 else ""
        yield f"the model {path} has other files there: {first} ({found}; here {mine[first]}){more}: copy it anew"


def _model_paths(config: ResolvedConfig) -> list[Path]:
    paths = [config.model.files.path]
    if config.speculation is not None:
        models = [drafter.model for drafter in config.speculation.drafters.values()]
        paths += [model.files.path for model in models if model is not None]
    return list(dict.fromkeys(paths))


def _marks(path: Path) -> dict[str, str]:
    if path.is_file():
        return {path.name: file_mark(path)}
    if not path.is_dir():
        return {}
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    return {file.name: file_mark(file) for file in files}
