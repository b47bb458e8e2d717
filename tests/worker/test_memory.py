"""What fits on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dovetail.config.load import load_config
from dovetail.contracts.device import DeviceMemory
from dovetail.contracts.errors import CapacityError
from dovetail.engine.resolving import resolve
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.worker.memory import kv_bytes, refuse_weights

GIB = 2**30


def test_what_the_largest_step_leaves() -> None:
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB)
    assert kv_bytes(memory, 0.9, 10 * GIB) == pytest.approx((72 - 20 - 10 - 0.8) * GIB, abs=2)
    assert kv_bytes(memory, 0.9, 10 * GIB, graphs=3 * GIB) == kv_bytes(memory, 0.9, 13 * GIB)
    assert kv_bytes(memory, 0.3, 10 * GIB) == 0


def test_too_little_memory_says_what_is_missing_and_what_would_fit(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    config = resolve(
        load_config({"model": {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "bfloat16"}, "device": "cpu"})
    )
    refuse_weights(10 * GIB, DeviceMemory(11 * GIB, 16 * GIB), config)
    with pytest.raises(CapacityError) as error:
        refuse_weights(15 * GIB, DeviceMemory(10 * GIB, 16 * GIB), config)
    for part in ("15.00 GiB", "5.00 GiB are missing", "tensor_parallel to 2", "8-bit or 4-bit", "end what else"):
        assert part in str(error.value)
    with pytest.raises(CapacityError, match="4-bit weights fit"):
        refuse_weights(30 * GIB, DeviceMemory(10 * GIB, 10 * GIB), config)
    # Of two layers, which two stages have already; ranks may still be more.
    staged = replace(config, stage_layers=(1, 1), tensor_parallel=2)
    with pytest.raises(CapacityError, match=r"set executor\.tensor_parallel to 4, or quantize"):
        refuse_weights(15 * GIB, DeviceMemory(10 * GIB, 16 * GIB), staged)
    with pytest.raises(CapacityError, match=r"tensor_parallel to 2 or executor\.pipeline_parallel to 2, or quantize"):
        refuse_weights(15 * GIB, DeviceMemory(10 * GIB, 16 * GIB), config)


def test_memory_of_the_plain_device() -> None:
    from dovetail.worker.plain_device import PlainDevice

    device = PlainDevice("cpu")
    assert device.torch_device == torch.device("cpu")
    with pytest.raises(CapacityError, match=r"cache\.memory_gib"):
        device.memory()
