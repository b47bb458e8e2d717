"""From full precision to groups."""

from __future__ import annotations

import torch

from dovetail.plugins.quantization.grouped.formats import EIGHT, FOUR, Groups

_SMALLEST = 2.0**-24
"""Least positive float16: a scale must not become 0 under weights that are not."""
_REFINEMENTS = 4


def round_to_eight(weight: torch.Tensor) -> Groups:
    """Symmetric, to nearest: scale = max |w| / 127 over each group in float16, every weight off by scale / 2 at most.
    Groups of less than about 1e-3 share float16's fixed steps of 6e-8, so that smaller ones keep fewer bits."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // EIGHT.group, EIGHT.group)
    scales = _scales(grouped.abs().amax(-1), 127)
    values = (grouped / scales.float()[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return Groups(EIGHT, values.view(rows, columns).view(torch.uint8), scales, None)


def round_to_four(weight: torch.Tensor) -> Groups:
    """From the group's least to its greatest weight in 15 steps, then refined: integers are fixed and scale and minimum
    solved for by least squares, which changes what rounds where, a few times over. Of all rounds, the one with the
    least squared error is kept group by group."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // FOUR.group, FOUR.group)
    least, greatest = grouped.amin(-1), grouped.amax(-1)
    scales, minimums = _scales(greatest - least, 15).float(), least
    best = _rounded(grouped, scales, minimums)
    for _ in range(_REFINEMENTS):
        values, scales, minimums, error = best
        solved = _rounded(grouped, *_least_squares(grouped, values))
        is_better = solved[3] < error
        chosen = is_better[..., None]
        best = (
            torch.where(chosen, solved[0], values),
            torch.where(is_better, solved[1], scales),
            torch.where(is_better, solved[2], minimums),
            torch.where(is_better, solved[3], error),
        )
    values, scales, minimums, _ = best
    return Groups(FOUR, values.view(rows, columns).to(torch.uint8), scales.half(), minimums.half())


def _scales(range_: torch.Tensor, steps: int) -> torch.Tensor:
    """float16 scales whose `steps` steps span `range_`, but for half a step: one that float16 has only much smaller,
    as happens below its full precision, becomes the next greater one."""
    scales = (range_ / steps).clamp_min(_SMALLEST).half()
    is_short = scales.float() * (steps + 0.5) < range_
    return (scales.view(torch.int16) + is_short).view(torch.float16)


def _rounded(
    grouped: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers, the scales and minimums as float16 has them, and the squared error."""
    scales, minimums = scales.half().float(), minimums.half().float()
    values = ((grouped - minimums[..., None]) / scales[..., None]).round_().clamp_(0, 15)
    error = (values * scales[..., None] + minimums[..., None]).sub_(grouped).square_().sum(-1)
    return values, scales, minimums, error


def _least_squares(grouped: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum that fit the integers best."""
    mean_value, mean_weight = values.mean(-1), grouped.mean(-1)
    centred = values - mean_value[..., None]
    scales = (centred * grouped).sum(-1) / centred.square().sum(-1).clamp_min(1.0)
    scales = scales.clamp_min(_SMALLEST)
    return scales, mean_weight - scales * mean_value
