"""The bundled transports under the suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dovetail.contracts.weights import ModelFiles, WeightReader
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat
from dovetail.plugins.weight_transports.disk import DiskTransport
from dovetail.plugins.weight_transports.in_process import InProcessTransport
from dovetail.testing import WeightSender, WeightTransportSuite


class HandsOver(WeightSender):
    def __init__(self, folder: Path):
        pass

    def connect(self, num_ranks: int) -> Mapping[str, Any]:
        return {}

    def send(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        return {"weights": tensors}


class WritesFiles(HandsOver):
    def __init__(self, folder: Path):
        self._folder = folder
        self._count = 0

    def send(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        self._count += 1
        path = self._folder / f"{self._count}.safetensors"
        save_file(dict(tensors), path)
        return {"path": path}


def open_safetensors(path: Path) -> WeightReader:
    return SafetensorsFormat(SafetensorsFormat.Options()).open(ModelFiles(str(path), path))


class TestInProcess(WeightTransportSuite):
    plugin = InProcessTransport
    create_sender = HandsOver


class TestDisk(WeightTransportSuite):
    plugin = DiskTransport
    create_sender = WritesFiles
    open_checkpoint = open_safetensors
