"""The folder that holds Medusa heads, as FasterDecoding's training writes it.

`config.json` has "medusa_num_heads" and "medusa_num_layers". `medusa_lm_head.safetensors` (or `.pt`) has, for head k
and residual block l of L, `{k}.{l}.linear.weight` and `{k}.{l}.linear.bias`, and `{k}.{L}.weight`, the head's own
unembedding; where that is absent the head shares the target's. Names may begin with `medusa_head.`, and may be in the
checkpoint of a whole model.

Our own optional key "medusa_head_accuracies" lists per head the share of held-out positions at which the head's token
of rank 1, 2, ... was right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dovetail.contracts.errors import ModelError

_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
_PREFIX = "medusa_head."
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_UNEMBED = re.compile(r"(\d+)\.(\d+)\.weight")


class _Config(BaseModel):
    """The keys of config.json that are read; others belong to the trainer."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    medusa_num_heads: int | None = Field(default=None, ge=1)
    medusa_num_layers: int | None = Field(default=None, ge=0)
    hidden_size: int | None = None
    vocab_size: int | None = None
    medusa_head_accuracies: list[list[float]] | None = None


@dataclass(frozen=True)
class HeadsLayout:
    """The contents of a folder of heads, known without reading weights."""

    file: Path
    prefix: str
    num_heads: int
    num_layers: int
    """Residual blocks per head."""
    hidden_size: int
    vocab_size: int | None
    """Vocabulary size by the unembedding or config.json; None where neither has it."""
    has_unembedding: bool
    accuracies: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True)
class HeadWeights:
    """Weights of K heads with L blocks, stacked."""

    blocks: Tensor
    """[L, K, hidden_size, hidden_size], to be multiplied from the right: x @ blocks."""
    biases: Tensor
    """[L, K, 1, hidden_size]"""
    unembed: Tensor | None
    """[K, hidden_size, vocab_size], or None: the target's is shared."""


def read_layout(folder: Path) -> HeadsLayout:
    """Reads config.json and the names and shapes of tensors. Raises `ModelError` that says what is wrong."""
    config = _read_config(folder)
    file = _weights_file(folder)
    with _tensors(file) as (shapes, _):
        names = [name for name in shapes if name.startswith(_PREFIX)]
        prefix = _PREFIX if names else ""
        bare = {name.removeprefix(prefix): shapes[name] for name in names or shapes}
    return _layout(file, prefix, bare, config)


def load_weights(layout: HeadsLayout, device: torch.device, dtype: torch.dtype) -> HeadWeights:
    """Reads the heads. Raises `ModelError` for files that changed or cannot be read."""
    heads, layers = range(layout.num_heads), range(layout.num_layers)
    with _tensors(layout.file) as (_, tensors):

        def stacked(name: str) -> Tensor:
            rows = [[tensors[layout.prefix + name.format(k=k, l=layer)] for k in heads] for layer in layers]
            return torch.stack([torch.stack(row) for row in rows]).to(device, dtype)

        hidden = layout.hidden_size
        if layout.num_layers:
            blocks = stacked("{k}.{l}.linear.weight").transpose(-1, -2).contiguous()
            biases = stacked("{k}.{l}.linear.bias").unsqueeze(-2)
        else:
            blocks = torch.empty(0, layout.num_heads, hidden, hidden, dtype=dtype, device=device)
            biases = torch.empty(0, layout.num_heads, 1, hidden, dtype=dtype, device=device)
        unembed = None
        if layout.has_unembedding:
            rows = [tensors[f"{layout.prefix}{k}.{layout.num_layers}.weight"] for k in heads]
            unembed = torch.stack(rows).to(device, dtype).transpose(-1, -2).contiguous()
    return HeadWeights(blocks, biases, unembed)


def named_shapes(layout: HeadsLayout, weights: HeadWeights) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the file, by its name."""
    return {name: tuple(tensor.shape) for name, tensor in _views(layout, weights).items()}


def replace_weights(layout: HeadsLayout, weights: HeadWeights, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies tensors, named as in the file, into the memory of `weights`."""
    views = _views(layout, weights)
    for name, tensor in tensors:
        views[name].copy_(tensor)


def _views(layout: HeadsLayout, weights: HeadWeights) -> dict[str, Tensor]:
    """Each tensor of the file as a view of `weights`."""
    views = {}
    for k in range(layout.num_heads):
        for layer in range(layout.num_layers):
            views[f"{k}.{layer}.linear.weight"] = weights.blocks[layer, k].transpose(-1, -2)
            views[f"{k}.{layer}.linear.bias"] = weights.biases[layer, k, 0]
        if weights.unembed is not None:
            views[f"{k}.{layout.num_layers}.weight"] = weights.unembed[k].transpose(-1, -2)
    return {layout.prefix + name: view for name, view in views.items()}


def _layout(file: Path, prefix: str, shapes: Mapping[str, tuple[int, ...]], config: _Config) -> HeadsLayout:
    blocks = {_key(match): shape for name, shape in shapes.items() if (match := _BLOCK.fullmatch(name))}
    unembed = {_key(match)[:2]: shape for name, shape in shapes.items() if (match := _UNEMBED.fullmatch(name))}
    unknown = [name for name in shapes if not _BLOCK.fullmatch(name) and not _UNEMBED.fullmatch(name)]
    if unknown or not shapes:
        found = ", ".join(sorted(unknown)[:3]) or "no tensors"
        raise ModelError(f"{file} is no file of Medusa heads (found {found}; expected names like 0.0.linear.weight)")
    num_heads = 1 + max([key[0] for key in blocks] + [key[0] for key in unembed])
    num_layers = 1 + max((layer for _, layer, _ in blocks), default=-1)
    if config.medusa_num_heads is not None and config.medusa_num_heads > num_heads:
        raise ModelError(f"config.json promises {config.medusa_num_heads} heads, {file} holds {num_heads}")
    if config.medusa_num_layers is not None and config.medusa_num_layers != num_layers:
        raise ModelError(f"config.json promises {config.medusa_num_layers} blocks per head, {file} holds {num_layers}")
    matrix = next(iter(unembed.values()), None) or blocks[0, 0, "weight"]
    hidden_size = matrix[-1]
    vocab_size = matrix[0] if unembed else config.vocab_size
    for head in range(num_heads):
        for layer in range(num_layers):
            _expect(file, f"{head}.{layer}.linear.weight", blocks.get((head, layer, "weight")), (hidden_size,) * 2)
            _expect(file, f"{head}.{layer}.linear.bias", blocks.get((head, layer, "bias")), (hidden_size,))
        if unembed:
            _expect(file, f"{head}.{num_layers}.weight", unembed.get((head, num_layers)), (matrix[0], hidden_size))
    accuracies = config.medusa_head_accuracies
    return HeadsLayout(
        file=file,
        prefix=prefix,
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        has_unembedding=bool(unembed),
        accuracies=None if accuracies is None else tuple(tuple(ranks) for ranks in accuracies),
    )


def _key(match: re.Match[str]) -> tuple[int, int, str]:
    parts = match.groups()
    return int(parts[0]), int(parts[1]), parts[-1]


def _expect(file: Path, name: str, got: tuple[int, ...] | None, wanted: tuple[int, ...]) -> None:
    if got is None:
        raise ModelError(f"{file} lacks {name}, which its other heads have")
    if got != wanted:
        raise ModelError(f"{file}: {name} has shape {list(got)}, expected {list(wanted)}")


def _read_config(folder: Path) -> _Config:
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; it should hold config.json and {_FILES[0]}")
    path = folder / "config.json"
    try:
        return _Config.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json") from None
    except (OSError, ValueError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ModelError(f"{path} cannot be read: {problem}") from error


def _weights_file(folder: Path) -> Path:
    for name in _FILES:
        if (folder / name).is_file():
            return folder / name
    raise ModelError(f"{folder} holds no weights of Medusa heads (looked for {', '.join(_FILES)})")


@contextmanager
def _tensors(file: Path) -> Iterator[tuple[dict[str, tuple[int, ...]], Mapping[str, Tensor]]]:
    """Shapes by name, and the tensors themselves, read when they are asked for."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                names = list(handle.keys())
                yield {name: tuple(handle.get_slice(name).get_shape()) for name in names}, _Lazy(handle, names)
        else:
            # Only tensors: nothing else that a pickle might hold is ever built.
            loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
            tensors = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
            yield {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors
    except (OSError, SafetensorError, RuntimeError, EOFError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


class _Lazy(Mapping[str, Tensor]):
    """Tensors of an open safetensors file."""

    def __init__(self, handle: Any, names: list[str]):
        self._handle = handle
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
