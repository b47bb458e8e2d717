"""What the kernels need of the machine, and what they have to know of it."""

from __future__ import annotations

import torch

from dovetail.contracts.attention import AttentionNeed
from dovetail.contracts.plugin import Environment, FixableReason
from dovetail.nn.triton_check import reasons_against_triton


def against_machine(name: str, need: AttentionNeed, environment: Environment) -> list[str]:
    """Whether Triton and a GPU that it compiles for are there."""
    if need.device_type != "cuda":
        return []
    if not environment.devices:
        why = environment.no_devices or "torch sees none; look at `nvidia-smi` and at torch.version.cuda"
        return [f"{name} needs a CUDA GPU: {why}."]
    device = min(environment.devices, key=lambda device: device.compute_capability)
    major, minor = device.compute_capability
    if major < 8:
        return [f"{name} needs compute capability 8.0 (Ampere) or later; {device.name} has {major}.{minor}."]
    if need.kv_dtype == "float8_e4m3fn" and (major, minor) < (8, 9):
        return [
            f"{name} needs compute capability 8.9 for pages of float8_e4m3fn; {device.name} has {major}.{minor}; set "
            f"cache.dtype to float8_e5m2 or int8."
        ]
    version = environment.packages.get("triton", "")
    if need.kv_dtype == "float8_e5m2" and need.dtype == "bfloat16" and lacks_e5m2(version, major * 10 + minor):
        return [
            FixableReason(
                f"{name} cannot widen pages of float8_e5m2 to bfloat16 on {device.name} with Triton {version}, which "
                f"uses an instruction of compute capability 9.0 there: install torch 2.12 or later, with its Triton, "
                f"or set cache.dtype to int8."
            )
        ]
    return reasons_against_triton(environment)


def device_facts(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and the compute capability as in `KernelConfig.arch`."""
    if device.type != "cuda":
        return 1, 80  # Triton's interpreter
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major * 10 + properties.minor


def lacks_e5m2(triton: str, arch: int) -> bool:
    """Whether this version of Triton fails to compile a cast of float8_e5m2 to bfloat16 for `arch` (80, 90): seen with
    3.6.0, not with 3.7.0."""
    return arch < 90 and triton.startswith("3.6.")
