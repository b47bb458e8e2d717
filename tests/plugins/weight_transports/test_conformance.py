"""The bundled transports under the suite of their kind."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from dovetail.contracts.weights import ModelFiles, WeightReader
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat
from dovetail.plugins.weight_transports.collective import CollectiveTransport
from dovetail.plugins.weight_transports.disk import DiskTransport
from dovetail.plugins.weight_transports.in_process import InProcessTransport
from dovetail.plugins.weight_transports.ipc import IpcTransport
from dovetail.rl import weight_sender
from dovetail.rl.collective_sender import CollectiveSender
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


class SharesMemory(HandsOver):
    def connect(self, num_ranks: int) -> Mapping[str, Any]:
        self._sender: Any = weight_sender.WeightSender(num_ranks, timeout_s=10)
        self._sent: Generator[Mapping[str, Any]] | None = None
        return self._sender.init_info()  # type: ignore[no-any-return]

    def send(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        if self._sent is not None:
            assert next(self._sent, None) is None
        self._sent = self._sender.send(tensors.items())
        return next(self._sent)

    def close(self) -> None:
        if self._sent is not None:
            self._sent.close()
        self._sender.close()


class Broadcasts(SharesMemory):
    def connect(self, num_ranks: int) -> Mapping[str, Any]:
        self._sender = CollectiveSender("127.0.0.1", world_size=1 + num_ranks, timeout_s=10)
        self._sent = None
        self._thread = Thread(target=self._sender.connect)
        self._thread.start()
        return self._sender.init_info()  # type: ignore[no-any-return]

    def send(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        self._thread.join()
        return super().send(tensors)


def open_safetensors(path: Path) -> WeightReader:
    return SafetensorsFormat(SafetensorsFormat.Options()).open(ModelFiles(str(path), path))


class TestInProcess(WeightTransportSuite):
    plugin = InProcessTransport
    create_sender = HandsOver


class TestDisk(WeightTransportSuite):
    plugin = DiskTransport
    create_sender = WritesFiles
    open_checkpoint = open_safetensors


class TestIpc(WeightTransportSuite):
    plugin = IpcTransport
    create_sender = SharesMemory
    options: ClassVar[Mapping[str, Any]] = {"timeout_s": 10}


class TestCollective(WeightTransportSuite):
    plugin = CollectiveTransport
    create_sender = Broadcasts
    options: ClassVar[Mapping[str, Any]] = {"timeout_s": 10}
