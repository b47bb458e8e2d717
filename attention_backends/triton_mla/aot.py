"""How the kernels are launched, as data: for compiling them where there is no GPU (`dovetail.testing.triton_aot`).

Constants are those of `LatentLauncher`, so what is compiled is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.attention_backends.paged_triton.aot import TYPES
from dovetail.attention_backends.paged_triton.kernels import merge_parts
from dovetail.attention_backends.paged_triton.launch import attend_options, merge_options
from dovetail.attention_backends.triton_mla.kernels import attend_latents, write_latents
from dovetail.attention_backends.triton_mla.launch import WRITE_OPTIONS, LatentLauncher
from dovetail.contracts.attention import AttentionLayer, AttentionSetup
from dovetail.contracts.kv import LatentSpec
from dovetail.nn.triton_launch import Launch

ROWS = ("decode", "verify", "prefill")
"""Kinds of rows."""
_POINTERS = {
    "tokens": "i32",
    "table": "i32",
    "tree": "u8",
    "items": "i32",
    "merges": "i32",
    "members": "i32",
    "partials": "fp32",
    "sums": "fp32",
    "sinks": "fp32",
}


@dataclass(frozen=True)
class LatentVariant:
    """What layers and pages a kernel is compiled for. The sizes are DeepSeek-V2's and -V3's."""

    arch: int
    num_heads: int = 128
    latent_size: int = 512
    rotary_size: int = 64
    dtype: str = "bfloat16"
    block_size: int = 16
    is_invariant: bool = False
    """As `AttentionSetup.batch_invariant`."""

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(0, self.num_heads, 1, self.latent_size + self.rotary_size, scale=1.0)

    def launcher(self) -> LatentLauncher:
        """On the CPU, to ask for constants."""
        spec = LatentSpec(latent_size=self.latent_size, rotary_size=self.rotary_size, dtype=self.dtype)
        setup = AttentionSetup(
            (self.layer,), spec, self.block_size, self.dtype, "cpu", 1, 1, 1, batch_invariant=self.is_invariant
        )
        return LatentLauncher(setup, spec, self.arch)


def attend_launch(variant: LatentVariant, rows: str, num_tokens: int = 1) -> Launch:
    """The attention kernel for queries of `num_tokens`, of one of the kinds `ROWS`."""
    launcher = variant.launcher()
    group = launcher.kind(variant.layer).group
    config = launcher.config(rows, num_tokens * group, group)
    constants = launcher.attend_constants(variant.layer, config)
    words = ", invariant" if variant.is_invariant else ""
    name = f"attend_latents {rows}, {variant.num_heads} heads{words}"
    return _launch(name, attend_latents, variant, constants, attend_options(config, variant.is_invariant))


def write_launch(variant: LatentVariant) -> Launch:
    """The kernel that writes latent vectors into pages."""
    return _launch("write_latents", write_latents, variant, variant.launcher().write_constants(), WRITE_OPTIONS)


def merge_launch(variant: LatentVariant) -> Launch:
    """The kernel that puts the parts of tiles together."""
    constants = variant.launcher().merge_constants(variant.layer)
    return _launch("merge_parts, latents", merge_parts, variant, constants, merge_options(variant.is_invariant))


def attend_launches(arch: int) -> list[Launch]:
    """The attention kernel as models with 16 heads a rank (DeepSeek-V2-Lite; V3 on eight ranks) and with 128 launch
    it."""
    few, many = LatentVariant(arch, num_heads=16), LatentVariant(arch)
    return [attend_launch(few, "decode"), *(attend_launch(many, rows) for rows in ROWS)]


def launches(arch: int) -> list[Launch]:
    """Every kernel."""
    many = LatentVariant(arch)
    return [*attend_launches(arch), merge_launch(many), write_launch(many)]


def _launch(
    name: str, kernel: Any, variant: LatentVariant, constants: Mapping[str, Any], options: Mapping[str, Any]
) -> Launch:
    signature = {argument: _type_of(argument, variant) for argument in kernel.arg_names if argument not in constants}
    return Launch(name, kernel, signature, constants, options)


def _type_of(name: str, variant: LatentVariant) -> str:
    if name in _POINTERS:
        return f"*{_POINTERS[name]}"
    if name in ("query", "latent", "kv_cache", "output"):
        return f"*{TYPES[variant.dtype]}"
    # As at run time: strides are multiples of 16.
    return "fp32" if name in ("factor", "value_scale") else "i32:16"
