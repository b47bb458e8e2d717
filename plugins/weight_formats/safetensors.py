"""The safetensors weight format: a directory as Hugging Face publishes it, or one file with config.json next to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles, TensorInfo, TokenizerFiles, WeightFormat, WeightReader
from dovetail.nn.mapped_pages import MappedPages
from dovetail.plugins.weight_formats.bnb_checkpoint import bnb_weights
from dovetail.plugins.weight_formats.expanded import ExpandedReader
from dovetail.plugins.weight_formats.int4_checkpoint import Int4Reader, Int4Scheme
from dovetail.plugins.weight_formats.mxfp4_checkpoint import mxfp4_weights
from dovetail.plugins.weight_formats.scaled_checkpoint import compressed_tensors_scheme, fp8_scheme

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


class SafetensorsFormat(WeightFormat):
    """One file, or shards with an index; tensors are views of memory-mapped files."""

    contract = (1, 0)
    quantizations = frozenset({"awq", "gptq", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4"})

    @classmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        """A .safetensors file, or a directory with such files, or with config.json and no GGUF.

        Directories that hold other weights are taken too, so that `config` can say how to convert them.
        """
        path = files.path
        try:
            if path.is_dir():
                is_model = (path / "config.json").exists() and not any(path.glob("*.gguf"))
                return is_model or any(path.glob("*.safetensors"))
            return path.suffix == ".safetensors"
        except OSError:
            return False

    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        """See `WeightFormat.config`: config.json, and generation_config.json under "generation_config"."""
        directory = _directory(files.path)
        _refuse_pickles(directory)
        path = directory / "config.json"
        if not path.exists():
            _refuse_adapter(directory)
            raise ModelError(f"{directory} has no config.json: it is no model directory of Hugging Face's form")
        config = _read_json(path)
        generation = directory / "generation_config.json"
        return {**config, "generation_config": _read_json(generation) if generation.exists() else {}}

    def tokenizer(self, files: ModelFiles) -> TokenizerFiles | None:
        """See `WeightFormat.tokenizer`. The directory's chat template is read with the rest of it."""
        directory = _directory(files.path)
        has_files = any((directory / name).exists() for name in _TOKENIZER_FILES)
        return TokenizerFiles(directory=directory) if has_files else None

    def open(self, files: ModelFiles) -> WeightReader:
        reader = self._open_plain(files.path)
        path = _directory(files.path) / "config.json"
        config = _read_json(path) if path.exists() else {}
        quantization = config.get("quantization_config") or {}
        match quantization.get("quant_method"):
            case "awq" | "gptq":
                return Int4Reader(reader, Int4Scheme.of(config))
            case "fp8":
                return ExpandedReader(reader, fp8_scheme(quantization))
            case "compressed-tensors":
                return ExpandedReader(reader, compressed_tensors_scheme(quantization))
            case "bitsandbytes":
                return ExpandedReader(reader, bnb_weights)
            case "mxfp4":
                return ExpandedReader(reader, mxfp4_weights)
        return reader

    def _open_plain(self, path: Path) -> SafetensorsReader:
        if not path.is_dir():
            return SafetensorsReader([path])
        _refuse_pickles(path)
        index = path / _INDEX
        if index.exists():
            return _open_shards(index)
        return SafetensorsReader([_single_file(path)])


class SafetensorsReader(WeightReader):
    """Tensors of one or more files, found by name."""

    def __init__(self, paths: Sequence[Path]):
        self._handles = {path: _open_file(path) for path in paths}
        self._pages = {path: MappedPages(path) for path in paths}
        self._paths: dict[str, Path] = {}
        for path, handle in self._handles.items():
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                if name in self._paths:
                    raise ModelError(f"tensor {name!r} is both in {self._paths[name]} and in {path}")
                self._paths[name] = path

    def infos(self) -> Sequence[TensorInfo]:
        """Every tensor, in the order of files and of names within each."""
        return [self._info(name, path) for name, path in self._paths.items()]

    def read(self, name: str) -> torch.Tensor:
        """See `WeightReader.read`: a view of the mapped file."""
        path = self._paths.get(name)
        if path is None:
            raise ModelError(f"the checkpoint has no tensor {name!r}")
        tensor: torch.Tensor = self._handles[path].get_tensor(name)
        return tensor

    def release(self, name: str) -> None:
        """The pages of the tensor's map."""
        tensor = self.read(name)
        self._pages[self._paths[name]].release(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def files(self) -> Sequence[Path]:
        """The files of all shards."""
        return list(self._handles)

    def close(self) -> None:
        """Lets go of the files; tensors that were handed out keep their maps alive."""
        self._handles.clear()
        self._paths.clear()

    def _info(self, name: str, path: Path) -> TensorInfo:
        part = self._handles[path].get_slice(name)
        shape = tuple(part.get_shape())
        kind = part.get_dtype()
        if kind not in _DTYPES:
            raise ModelError(f"{path}: tensor {name!r} has dtype {kind}, which this version cannot read")
        dtype, size = _DTYPES[kind]
        return TensorInfo(name, shape, dtype, math.prod(shape) * size)


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is no regular file")  # a pipe would be waited for
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


def _refuse_adapter(directory: Path) -> None:
    path = directory / "adapter_config.json"
    if path.exists():
        base = _read_json(path).get("base_model_name_or_path") or "an unnamed model"
        raise ModelError(
            f"{directory} is an adapter (LoRA) for {base}, no model: give that as the model, set lora.enabled and name "
            "the adapter in requests; or merge it into its model with the library peft (merge_and_unload, then "
            "save_pretrained), and give the directory of that"
        )


def _refuse_pickles(directory: Path) -> None:
    if any(directory.glob("*.safetensors")) or (directory / _INDEX).exists():
        return
    pickles = sorted(p.name for pattern in ("pytorch_model*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory} has weights as pickles only ({', '.join(pickles[:3])}), which can run code when they are "
            'read. Convert them where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{directory}').save_pretrained('{directory}', safe_serialization=True)\""
        )


def _single_file(directory: Path) -> Path:
    found = sorted(directory.glob("*.safetensors"))
    if directory / _SINGLE in found:
        return directory / _SINGLE
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:4]) or "none"
        raise ModelError(f"{directory} has neither {_SINGLE} nor {_INDEX}, nor just one other file (found: {names})")
    return found[0]


def _open_shards(index: Path) -> SafetensorsReader:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map: it is truncated or not an index of safetensors files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ModelError(
                f"{index}: weight_map says that tensor {tensor!r} is in {name!r}, which names no file in {index.parent}"
            )
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise ModelError(
            f"{index.parent} lacks {len(missing)} of {len(names)} weight files that {index.name} names: "
            f"{', '.join(missing[:4])}; copy or download them"
        )
    reader = SafetensorsReader([index.parent / name for name in names])
    absent = sorted(weight_map.keys() - {info.name for info in reader.infos()})
    if absent:
        raise ModelError(f"{index} names tensors that no file has: {', '.join(absent[:4])}")
    return reader


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist") from error
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelError(
            f"{path} ({size} bytes) is truncated or not a safetensors file: {error}; copy or download it again"
        ) from error
