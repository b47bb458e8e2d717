"""Adapters as the library PEFT saves them: adapter_config.json and adapter_model.safetensors in a folder.

Files are read whole, and not mapped: a mapped file that somebody cuts short would end the process. No code is run:
pickled weights are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dovetail.contracts.errors import ModelError
from dovetail.contracts.lora import AdapterNotFound

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER = 64 << 20
_PIECE = 1 << 22
_LISTED = 4
_SELECTING = ("layers_to_transform", "layers_pattern", "exclude_modules")
"""Keys of the config that leave out some of the layers that `target_modules` names."""
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127

_UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA (use_dora), which also scales the weights",
    "use_qalora": "QA-LoRA (use_qalora)",
    "lora_bias": "biases beside its matrices (lora_bias)",
    "modules_to_save": "whole layers in place of the model's (modules_to_save)",
    "trainable_token_indices": "changed embeddings (trainable_token_indices)",
    "target_parameters": "matrices of single parameters, as those of experts (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "an activation by tokens (aLoRA)",
    "megatron_config": "layers of Megatron (megatron_config)",
}
"""Keys of the config that ask for what is not served, each with what it is."""
_MERGE = "merge it into the weights with PEFT (merge_and_unload) and serve the merged model"


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One matrix in the file of tensors."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Where it begins in the file."""
    stop: int


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """What an adapter adds to one linear layer."""

    a: StoredMatrix
    b: StoredMatrix
    scale: float
    """Factor of b a: alpha / rank, or alpha / sqrt(rank)."""

    @property
    def rank(self) -> int:
        """Rows of a."""
        return self.a.shape[0]


Targets = str | tuple[str, ...]
"""`target_modules` of a config: a pattern of whole names, "all-linear", or ends of names."""

Marks = tuple[tuple[int, int, int], ...]
"""Of each file: i-node, size, and time of change in nanoseconds."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter whose headers were read and understood."""

    path: Path
    layers: Mapping[str, StoredLayer]
    """By the dotted name of the layer in the checkpoint."""
    marks: Marks
    targets: Targets | None
    """Which layers were trained; None where the config does not say so by their names alone."""

    @property
    def rank(self) -> int:
        """The largest of the layers'."""
        return max(layer.rank for layer in self.layers.values())

    @property
    def num_bytes(self) -> int:
        """Of all matrices."""
        return sum(layer.a.stop - layer.a.start + layer.b.stop - layer.b.start for layer in self.layers.values())

    def digest(self) -> str:
        """Hash of all that the adapter's effect follows from: names, scales and matrices; in hexadecimal. Reads the
        file once, in pieces. Raises `ModelError` where it cannot."""
        total = blake2b(digest_size=16)
        with _open(self.path / TENSOR_FILE) as file:
            for name, layer in sorted(self.layers.items()):
                total.update(repr((name, layer.scale)).encode())
                for matrix in (layer.a, layer.b):
                    total.update(repr((matrix.dtype, matrix.shape)).encode())
                    file.seek(matrix.start)
                    left = matrix.stop - matrix.start
                    while left:
                        piece = file.read(min(left, _PIECE))
                        if not piece:
                            raise ModelError(
                                f"{self.path / TENSOR_FILE} was cut short while it was read: load it again"
                            )
                        total.update(piece)
                        left -= len(piece)
        return total.hexdigest()

    def data(self) -> Iterator[tuple[str, StoredLayer, bytearray, bytearray]]:
        """Of each layer the name, what is stored, and the bytes of a and b. Raises `ModelError` where the file cannot
        be read."""
        with _open(self.path / TENSOR_FILE) as file:
            for name, layer in self.layers.items():
                yield name, layer, self._read(file, layer.a), self._read(file, layer.b)

    def _read(self, file: Any, matrix: StoredMatrix) -> bytearray:
        data = bytearray(matrix.stop - matrix.start)
        file.seek(matrix.start)
        if file.readinto(data) != len(data):
            raise ModelError(f"{self.path / TENSOR_FILE} was cut short while it was read: load it again")
        return data


def current_marks(path: Path) -> Marks | None:
    """The marks of an adapter's files as they are now; None where one is gone."""
    try:
        status = [(path / name).stat() for name in (CONFIG_FILE, TENSOR_FILE)]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in status)


def open_adapter(path: Path) -> AdapterFiles:
    """Reads the config and the headers of an adapter's folder. Raises `AdapterNotFound` for a folder that is not there,
    and `ModelError` for what is no adapter, is damaged, or asks for what is not served."""
    if not path.is_dir():
        what = "is a file" if path.is_file() else "is not there"
        raise AdapterNotFound(
            f"the adapter's folder {path} {what}: give the local folder that PEFT's save_pretrained wrote, with"
            f" {CONFIG_FILE} and {TENSOR_FILE}"
        )
    marks = current_marks(path)
    if marks is None:
        raise ModelError(_missing_files(path))
    config = _read_config(path)
    matrices = _read_header(path / TENSOR_FILE)
    return AdapterFiles(path, _layers(path, config, matrices), marks, _targets(config))


def _missing_files(path: Path) -> str:
    if not (path / CONFIG_FILE).is_file():
        inner = [found.parent for found in sorted(path.glob(f"*/{CONFIG_FILE}"))[:_LISTED]]
        hint = f"; did you mean {' or '.join(map(str, inner))}?" if inner else ""
        return f"{path} is no adapter: it has no {CONFIG_FILE}{hint}"
    if (path / _PICKLE_FILE).is_file():
        return (
            f"{path} has its tensors in {_PICKLE_FILE}, a pickle, which can run code when it is read, and is refused:"
            " save the adapter anew with PEFT's save_pretrained(..., safe_serialization=True)"
        )
    return f"{path} is no whole adapter: it has {CONFIG_FILE} and no {TENSOR_FILE}"


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path / CONFIG_FILE} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path / CONFIG_FILE} holds no mapping")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path} is an adapter of the kind {kind!r}, and only LORA is served: {_MERGE}")
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise ModelError(f"{path} has {what}, which is not served: {_MERGE}")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path} changes biases (bias: {config['bias']!r}), which is not served: {_MERGE}")
    return config


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def _read_header(path: Path) -> dict[str, StoredMatrix]:
    """The tensors of a safetensors file by name."""
    damaged = f"{path} is damaged or cut short, or no safetensors file"
    with _open(path) as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        text = file.read(length) if len(prefix) == 8 and length <= _MAX_HEADER else b""
        size = file.seek(0, 2)
    if not text or len(text) < length:
        raise ModelError(f"{damaged}: it does not begin with a header")
    found: dict[str, StoredMatrix] = {}
    try:
        for name, entry in json.loads(text).items():
            if name == "__metadata__":
                continue
            start, stop = (8 + length + int(offset) for offset in entry["data_offsets"])
            matrix = StoredMatrix(str(entry["dtype"]), tuple(map(int, entry["shape"])), start, stop)
            found[name] = _checked(matrix, name, size, damaged)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{damaged}: {type(error).__name__} in its header") from None
    return found


def _checked(matrix: StoredMatrix, name: str, size: int, damaged: str) -> StoredMatrix:
    if matrix.dtype not in _DTYPE_BYTES:
        raise ModelError(f"{name} is of dtype {matrix.dtype}: adapters are floats of 16, 32 or 64 bits")
    num_bytes = math.prod(matrix.shape) * _DTYPE_BYTES[matrix.dtype]
    if not 0 <= matrix.start <= matrix.stop <= size or matrix.stop - matrix.start != num_bytes:
        raise ModelError(f"{damaged}: {name} is not where its header says")
    return matrix


_NAME = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")


def _layers(path: Path, config: Mapping[str, Any], matrices: Mapping[str, StoredMatrix]) -> dict[str, StoredLayer]:
    pairs: dict[str, dict[str, StoredMatrix]] = {}
    strange: list[str] = []
    for name, matrix in matrices.items():
        match = _NAME.fullmatch(name)
        if match is None:
            strange.append(name)
        else:
            pairs.setdefault(match["layer"], {})[match["matrix"]] = matrix
    if strange:
        raise ModelError(_strange(path, strange))
    lone = [f"{name} has lora_{next(iter(pair))} alone" for name, pair in pairs.items() if len(pair) == 1]
    if lone:
        raise ModelError(
            f"{path} lacks tensors: {first_few(lone)}. The file was not written whole: save the adapter anew"
        )
    if not pairs:
        raise ModelError(f"{path / TENSOR_FILE} holds no adapter: it has no lora_A and lora_B")
    return {name: _layer(path, config, name, pair) for name, pair in pairs.items()}


def _strange(path: Path, names: list[str]) -> str:
    """What tensors are that are no matrices of linear layers."""
    kinds = (
        ("lora_embedding_", "adapters of embeddings"),
        ("lora_magnitude_vector", "magnitudes of DoRA"),
        (".lora_bias", "biases beside its matrices"),
        (".lora_B.bias", "biases beside its matrices"),
        (".bias", "biases"),
        ("modules_to_save", "whole layers (modules_to_save)"),
    )
    for part, what in kinds:
        if found := [name for name in names if part in name]:
            return f"{path} has {what}, which are not served ({first_few(found)}): {_MERGE}"
    return f"{path} has tensors that are no lora_A or lora_B of a linear layer ({first_few(names)}): {_MERGE}"


def _layer(path: Path, config: Mapping[str, Any], name: str, pair: Mapping[str, StoredMatrix]) -> StoredLayer:
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or 0 in a.shape + b.shape:
        raise ModelError(
            f"{path}: {name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, which are no [rank, in_features]"
            " and [out_features, rank] of one rank"
        )
    rank = _pattern_value(config, "rank_pattern", name, config.get("r", a.shape[0]))
    if isinstance(rank, bool) or not isinstance(rank, int | float):
        raise ModelError(
            f"{path / CONFIG_FILE}: the rank of {name} is {rank!r}, which is no number: r and the values of"
            " rank_pattern are integers"
        )
    if rank != a.shape[0]:
        raise ModelError(
            f"{path}: {name} has rank {a.shape[0]}, and {CONFIG_FILE} says {rank}: the two files are not of one adapter"
        )
    alpha = _pattern_value(config, "alpha_pattern", name, config.get("lora_alpha", rank))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -_FLOAT32_MAX <= alpha <= _FLOAT32_MAX:
        raise ModelError(f"{path / CONFIG_FILE}: lora_alpha {alpha!r} is no number that float32 holds")
    return StoredLayer(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _pattern_value(config: Mapping[str, Any], key: str, name: str, default: Any) -> Any:
    """A layer's own rank or alpha, as PEFT finds it: the first pattern that the end of the name matches."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, Mapping):
        raise ModelError(f"{CONFIG_FILE}: {key} is no mapping")
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as error:
            raise ModelError(f"{CONFIG_FILE}: {key} has {pattern!r}, which is no pattern: {error}") from None
    return default


def _targets(config: Mapping[str, Any]) -> Targets | None:
    targets = config.get("target_modules")
    if any(config.get(key) not in (None, [], "") for key in _SELECTING) or not targets:
        return None
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        return tuple(targets)
    return targets if isinstance(targets, str) and _is_pattern(targets) else None


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def first_few(items: list[str]) -> str:
    """The first of some names, for a message, and how many more there are."""
    more = f", and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{', '.join(items[:_LISTED])}{more}"
