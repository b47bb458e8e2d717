"""The `in_process` transport: whoever drives the engine hands the tensors over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import RequestError
from dovetail.contracts.weight_transport import WeightTransport, WeightTransportCapabilities
from dovetail.contracts.weights import WeightReader
from dovetail.plugins.weight_transports.tensors import TensorsReader


class InProcessTransport(WeightTransport):
    """`update_info` is `{"weights": {name: tensor}}`, or a list of such pairs.

    Workers in this process read the tensors themselves. To workers that are processes of their own each bucket is
    copied through a pipe: give large models in several buckets, or choose `ipc`.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = WeightTransportCapabilities(device_types=None, tensor_parallel=None)

    def receive(self, update_info: Mapping[str, Any]) -> WeightReader:
        if set(update_info) != {"weights"}:
            raise RequestError(
                f"update_info has the keys {', '.join(map(str, update_info)) or '(none)'}; in_process takes"
                ' {"weights": {name: tensor}}'
            )
        weights = update_info["weights"]
        try:
            pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
            tensors = dict(pairs)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"weights must map names to tensors, or be a list of (name, tensor), got {type(weights).__name__}"
            ) from error
        if len(tensors) < len(pairs):
            raise RequestError("weights names a tensor twice in one bucket")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise RequestError(
                    f"weights has {name!r}: {type(tensor).__name__}; it maps names to tensors of this process. A"
                    " trainer in another one sends by disk, ipc or collective"
                )
        return TensorsReader(tensors)
