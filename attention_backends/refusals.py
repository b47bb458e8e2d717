"""Why a backend cannot serve a need, judged by the capabilities that it declares."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.contracts.attention import AttentionCapabilities, AttentionNeed


def reasons_against(name: str, can: AttentionCapabilities, need: AttentionNeed) -> list[str]:
    """One sentence for each part of `need` that `can` does not cover; empty where it covers all of it."""
    reasons = []
    if need.device_type not in can.device_types:
        reasons.append(f"{name} attention runs on {_listed(can.device_types)}, not on {need.device_type}.")
    if need.dtype not in can.dtypes:
        reasons.append(f"{name} attention serves the dtypes {_listed(can.dtypes)}, not {need.dtype}; set model.dtype.")
    if can.head_sizes is not None and not need.head_sizes <= can.head_sizes:
        missing = _listed(need.head_sizes - can.head_sizes)
        reasons.append(f"{name} attention serves the head sizes {_listed(can.head_sizes)}; the model has {missing}.")
    if need.block_size % can.block_size_multiple:
        reasons.append(
            f"{name} attention needs a block size that is a multiple of {can.block_size_multiple}, not "
            f"{need.block_size}; set cache.block_size."
        )
    reasons += [f"{name} attention has no {feature}." for feature in _missing_features(can, need)]
    return reasons


def _missing_features(can: AttentionCapabilities, need: AttentionNeed) -> Iterable[str]:
    asked = (
        ("sliding window", need.sliding_window, can.sliding_window),
        ("soft cap of the scores", need.soft_cap, can.soft_cap),
        ("ALiBi bias", need.alibi, can.alibi),
        ("tree masks", need.trees, can.trees),
        ("batch-invariant mode", need.batch_invariant, can.batch_invariant),
    )
    return (feature for feature, is_needed, is_served in asked if is_needed and not is_served)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values)))
