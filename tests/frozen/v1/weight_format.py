"""A checkpoint in one .npz file, with the config as JSON among the arrays."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles, TensorInfo, TokenizerFiles, WeightFormat, WeightReader

CONFIG = "config.json"


class Reader(WeightReader):
    def __init__(self, path: Path):
        self._path = path
        self._arrays = np.load(path)

    def infos(self) -> Sequence[TensorInfo]:
        arrays = {name: self._arrays[name] for name in self._arrays.files if name != CONFIG}
        return [TensorInfo(name, array.shape, str(array.dtype), array.nbytes) for name, array in arrays.items()]

    def read(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._arrays[name])

    def files(self) -> Sequence[Path]:
        return [self._path]

    def close(self) -> None:
        self._arrays.close()


class Frozen(WeightFormat):
    contract = (1, 0)

    @classmethod
    def recognizes(cls, files: ModelFiles) -> bool:
        return files.path.suffix == ".npz"

    def config(self, files: ModelFiles) -> Mapping[str, Any]:
        try:
            with np.load(files.path) as arrays:
                return json.loads(str(arrays[CONFIG])) | {"generation_config": {}}
        except (KeyError, OSError, ValueError) as error:
            raise ModelError(f"{files.path} is no checkpoint: {error}") from error

    def tokenizer(self, files: ModelFiles) -> TokenizerFiles | None:
        return None

    def open(self, files: ModelFiles) -> WeightReader:
        return Reader(files.path)
