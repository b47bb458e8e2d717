"""Memory of a device: whether the weights fit, and what is left to the KV cache."""

from __future__ import annotations

import math

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.device import Device, DeviceMemory
from dovetail.contracts.errors import CapacityError
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.worker.estimate import estimate_memory
from dovetail.worker.machine.environment import detect_environment

_GIB = 2**30
_LIBRARY_SHARE = 0.01
"""Of the device's memory, for what libraries allocate without torch."""


def check_weights_fit(config: ResolvedConfig, device: Device) -> None:
    """Raises `CapacityError` for an accelerator whose free memory is less than the weights take, with what is missing
    and what would fit."""
    if device.torch_device.type == "cpu":
        return
    estimate = estimate_memory(config, detect_environment(config.device_type))
    refuse_weights(estimate.weight_bytes + estimate.target_copy_bytes + estimate.adapter_bytes, device.memory(), config)


def refuse_weights(needed: int, memory: DeviceMemory, config: ResolvedConfig) -> None:
    """The comparison and the advice of `check_weights_fit`. `needed`: bytes of the weights of one rank, over stages of
    the stage that holds the most."""
    if needed <= memory.free:
        return
    times = math.ceil(needed / max(1, int(0.8 * memory.free)))
    ranks, stages = config.tensor_parallel * times, config.num_stages * times
    width = DTYPE_BYTES[config.model.dtype]
    smaller = [name for name, share in (("8-bit", 1 / width), ("4-bit", 0.6 / width)) if needed * share <= memory.free]
    ways = [f"executor.tensor_parallel to {ranks}"]
    if stages <= config.model.size.num_layers:
        ways.append(f"executor.pipeline_parallel to {stages}")
    advice = [f"set {' or '.join(ways)}"]
    if config.quantization is None and smaller:
        advice.append(f"quantize ({' or '.join(smaller)} weights fit)")
    if memory.free < 0.9 * memory.total:
        advice.append("end what else uses the device")
    raise CapacityError(
        f"the weights take {needed / _GIB:.2f} GiB per rank and the device has {memory.free / _GIB:.2f} of "
        f"{memory.total / _GIB:.2f} GiB free: {(needed - memory.free) / _GIB:.2f} GiB are missing; "
        f"{', or '.join(advice)}"
    )


def kv_bytes(memory: DeviceMemory, fraction: float, peak: int, graphs: int = 0) -> int:
    """Bytes for KV pages.

    `memory` is that of a device with the weights on it, `peak` what the largest step takes besides, `graphs` what all
    captured graphs take, and `fraction` how much of the device this worker may use, others' use included. Never below
    0.
    """
    used = memory.total - memory.free
    return max(0, int(fraction * memory.total) - used - peak - graphs - int(_LIBRARY_SHARE * memory.total))
