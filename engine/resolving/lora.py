"""The rule about low-rank adapters: how many, in which dtype, and which are loaded at the start."""

from __future__ import annotations

from pathlib import Path

from dovetail.config.resolved import ResolvedLoRA
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.engine.resolving.resolution import Resolution


def settle_lora(state: Resolution, model_dtype: str) -> ResolvedLoRA | None:
    """None where adapters are off. `model_dtype`: of activations. Raises `ConfigError` for values that contradict each
    other."""
    section = state.config.lora
    if not section.enabled:
        if section.modules:
            raise ConfigError(
                f"lora.modules ({state.layered.origin('lora.modules')}) names adapters, and lora.enabled is off: set"
                " lora.enabled (enable_lora), or leave lora.modules out"
            )
        return None
    kept = section.max_cpu_loras
    if kept is None:
        kept = section.max_loras
        state.decide("lora.max_cpu_loras", kept, "as many as lora.max_loras")
    if kept < section.max_loras:
        raise ConfigError(
            f"lora.max_cpu_loras {kept} ({state.layered.origin('lora.max_cpu_loras')}) is less than lora.max_loras"
            f" {section.max_loras}: raise the first, or leave it out"
        )
    dtype = _settle_dtype(state, model_dtype)
    for name, path in section.modules.items():
        if not name.strip() or not path.strip():
            raise ConfigError(f"lora.modules: {name!r}: {path!r}: a name and a folder are needed")
    modules = tuple(
        (name, str((state.layered.base_dir(("lora", "modules", name)) / Path(path).expanduser()).absolute()))
        for name, path in section.modules.items()
    )
    return ResolvedLoRA(section.max_loras, section.max_rank, kept, dtype, modules)


def _settle_dtype(state: Resolution, model_dtype: str) -> str:
    dtype = state.config.lora.dtype
    if dtype == "auto":
        state.decide("lora.dtype", model_dtype, "the model's dtype")
        return model_dtype
    if dtype != model_dtype and DTYPE_BYTES[dtype] >= DTYPE_BYTES[model_dtype]:
        raise ConfigError(
            f"lora.dtype {dtype} ({state.layered.origin('lora.dtype')}): adapters have the model's dtype, which is"
            f" {model_dtype}, or a narrower one: leave lora.dtype out, or set model.dtype {dtype}"
        )
    return dtype
