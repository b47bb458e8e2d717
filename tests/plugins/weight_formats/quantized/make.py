"""Makes the files beside it: small layers as bitsandbytes and compressed-tensors write them, with the values that these
libraries themselves read from them.

    pip install torch==2.13.0 safetensors bitsandbytes==0.50.2 compressed-tensors==0.20.0
    python tests/plugins/weight_formats/quantized/make.py

Each file holds the stored tensors of one layer "a", the library's own values as "expected", and the checkpoint's
quantization_config in its metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
ROWS, COLUMNS = 24, 128


def weights() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def save(name: str, stored: dict[str, torch.Tensor], expected: torch.Tensor, config: dict[str, Any]) -> None:
    tensors = {f"a.{key}": tensor.contiguous() for key, tensor in stored.items()} | {"expected": expected.float()}
    save_file(tensors, HERE / f"{name}.safetensors", metadata={"quantization_config": json.dumps(config)})


def bitsandbytes_files() -> None:
    import bitsandbytes.functional as bnb

    for quant_type, nested in (("nf4", False), ("nf4", True), ("fp4", False)):
        packed, state = bnb.quantize_4bit(
            weights(), blocksize=64, quant_type=quant_type, compress_statistics=nested, quant_storage=torch.uint8
        )
        stored = {"weight": packed} | {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": quant_type}
        name = f"bnb-{quant_type}{'-nested' if nested else ''}"
        save(name, stored, bnb.dequantize_4bit(packed, state), config)
    numbers, scales, _ = bnb.int8_vectorwise_quant(weights().half())
    expected = bnb.int8_vectorwise_dequant(numbers, scales)
    stored = {"weight": numbers, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    save("bnb-int8", stored, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def compressed_tensors_files() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    cases = {
        "ct-int4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        "ct-int4-asymmetric": (
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        ),
        "ct-int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        "ct-int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        "ct-fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "ct-fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    }
    for name, (format_name, given) in cases.items():
        arguments = QuantizationArgs(**given)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=format_name)
        size = given.get("group_size") or (COLUMNS if given["strategy"] == "channel" else None)
        grouped = weights().reshape(ROWS, -1, size) if size else weights().reshape(1, 1, -1)
        low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
        scale, zero = calculate_qparams(low, high, arguments)
        scale, zero = (scale.reshape(-1), zero.reshape(-1)) if size is None else (scale, zero)
        compressor = BaseCompressor.get_value_from_registry(format_name)
        layer = {"weight": weights(), "weight_scale": scale.bfloat16().float()}
        if not arguments.symmetric:
            layer["weight_zero_point"] = zero
        stored = compressor.compress(dict(layer), scheme)
        values = compressor.decompress(dict(stored), scheme)["weight"]
        config = {
            "quant_method": "compressed-tensors",
            "format": format_name,
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {**given, "symmetric": arguments.symmetric}}
            },
        }
        save(name, stored, values, config)


if __name__ == "__main__":
    bitsandbytes_files()
    compressed_tensors_files()
