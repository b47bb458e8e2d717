"""The `disk` transport: a checkpoint that a trainer wrote, in the format of the engine's model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.weight_transport import WeightTransport, WeightTransportCapabilities
from dovetail.contracts.weights import WeightReader


class DiskTransport(WeightTransport):
    """`update_info` is `{"path": folder or file}`. The files are read when the weights are written, so they must stay
    as they are until `finish_weight_update` returns. Several buckets may be several files."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = WeightTransportCapabilities(device_types=None, tensor_parallel=None, keeps_tensors=True)

    def receive(self, update_info: Mapping[str, Any]) -> WeightReader:
        path = update_info.get("path")
        if set(update_info) != {"path"} or not isinstance(path, str | os.PathLike) or not str(path):
            raise RequestError(f'update_info is {dict(update_info)!r}; disk takes {{"path": folder or file}}')
        # Of names that no file can have, os.path says that nothing is there; pathlib raises for them.
        if not os.path.exists(path):
            raise ModelError(f"no file or directory {path}: write the checkpoint before update_weights names it")
        return self.setup.open_checkpoint(Path(path).absolute())
