"""Memory of a device: whether the weights fit, and what the largest step leaves to the KV cache."""

from __future__ import annotations

import math

import numpy as np
import torch

from dovetail.config.estimate import estimate_memory
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.device import Device, DeviceMemory
from dovetail.contracts.errors import CapacityError
from dovetail.contracts.kv import DTYPE_BYTES, KVLayout
from dovetail.contracts.model import CausalLM
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.registry.environment import detect_environment
from dovetail.runner.forward import EagerForward
from dovetail.runner.input_batch import StepInputs
from dovetail.runner.sampling_ops import Truncation, draw, truncated_weights

_GIB = 2**30
_GRAPH_SHARE = 0.01
"""Of the device's memory, for captured graphs and what libraries allocate beside torch."""
_SAMPLED_ROWS = 256
"""Rows over which the sampler's temporaries are measured; it takes more rows as one batch too, but rarely has them."""


def check_weights_fit(config: ResolvedConfig, device: Device) -> None:
    """Raises `CapacityError` for an accelerator whose free memory is less than the weights take, with what is missing
    and what would fit."""
    if device.torch_device.type == "cpu":
        return
    needed = estimate_memory(config, detect_environment(config.device_type)).weight_bytes
    refuse_weights(needed, device.memory(), config)


def refuse_weights(needed: int, memory: DeviceMemory, config: ResolvedConfig) -> None:
    """The comparison and the advice of `check_weights_fit`. `needed`: bytes of this rank's weights."""
    if needed <= memory.free:
        return
    ranks = config.tensor_parallel * math.ceil(needed / max(1, int(0.8 * memory.free)))
    width = DTYPE_BYTES[config.model.dtype]
    smaller = [name for name, share in (("8-bit", 1 / width), ("4-bit", 0.6 / width)) if needed * share <= memory.free]
    advice = [f"set executor.tensor_parallel to {ranks}"]
    if config.quantization is None and smaller:
        advice.append(f"quantize ({' or '.join(smaller)} weights fit)")
    if memory.free < 0.9 * memory.total:
        advice.append("end what else uses the device")
    raise CapacityError(
        f"the weights take {needed / _GIB:.2f} GiB per rank and the device has {memory.free / _GIB:.2f} of "
        f"{memory.total / _GIB:.2f} GiB free: {(needed - memory.free) / _GIB:.2f} GiB are missing; "
        f"{', or '.join(advice)}"
    )


def kv_bytes(memory: DeviceMemory, fraction: float, peak: int) -> int:
    """Bytes for KV pages.

    `memory` is that of a device with the weights on it, `peak` what the largest step takes beside them, and `fraction`
    how much of the device this worker may use, others' use included. Never below 0.
    """
    used = memory.total - memory.free
    return max(0, int(fraction * memory.total) - used - peak - int(_GRAPH_SHARE * memory.total))


def largest_step(limits: SchedulerLimits, max_model_len: int, layout: KVLayout) -> StepInputs:
    """Prompts as long as may be, max_num_batched_tokens in all, whose pages are all block 0."""
    total = limits.max_num_batched_tokens
    lengths = [max_model_len] * (total // max_model_len)
    if total % max_model_len:
        lengths.append(total % max_model_len)
    counts = np.array(lengths[: limits.max_num_seqs], dtype=np.int32)
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    positions = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    table = np.zeros((len(counts), layout.blocks_for(int(counts.max()))), dtype=np.int32)
    slots = positions % layout.block_size
    return StepInputs(
        rows=np.arange(len(counts)),
        query_start=query_start,
        seq_lens=counts,
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        block_tables=[table for _ in layout.groups],
        slot_mappings=[slots for _ in layout.groups],
        num_drafts=np.zeros_like(counts),
        reaches_end=np.ones(len(counts), dtype=bool),
    )


@torch.inference_mode()
def run_largest(model: CausalLM, forward: EagerForward, step: StepInputs, num_rows: int, device: torch.device) -> None:
    """The step, the logits of `num_rows` requests, and a draw with top_k and top_p, which takes the most memory."""
    ids = torch.from_numpy(step.input_ids).to(device)
    hidden, _ = forward.run(step, ids, torch.from_numpy(step.positions).to(device))
    logits = model.compute_logits(hidden[:num_rows]).float()[:_SAMPLED_ROWS]
    count = len(logits)

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    truncation = Truncation(
        full(1.0, torch.float32), full(0.0, torch.float32), full(50, torch.int64), full(0.9, torch.float64)
    )
    weights = truncated_weights(logits, truncation, torch.arange(count, device=device))
    draw(weights.nan_to_num_(0.0).add_(1e-6), full(0.5, torch.float64))
