"""NF4 with double quantization (QLoRA, Dettmers et al. 2023, section 3).

A row of weights is cut into blocks. A block holds a 4-bit code per weight and one constant, the largest magnitude among
its weights; a code is a place in a table of 16 numbers in [-1, 1], which has an equal share of a normal distribution
next to each. The constants of a row are numbers of one sign and of nearly one size: they are held in 8 bits, as float8
offsets from their mean.
"""

from __future__ import annotations

import functools

import torch

# fmt: off
TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
"""The 16 numbers (QLoRA, appendix E). 0 is one of them, so zeros stay zeros."""

_PAIR_DTYPES = {2: torch.int32, 4: torch.int64}
"""Integers that take as many bytes as two numbers of so many bytes."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = torch.finfo(torch.float32).tiny


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256]: the two numbers in `dtype` that each byte encodes, the lower four bits first, side by side in one integer:
    torch copies single elements several times as fast as rows of two."""
    with torch.inference_mode(False):
        table = torch.tensor(TABLE, dtype=dtype, device=device)
        codes = torch.arange(256, device=device)
        pairs = torch.stack((table[codes % 16], table[codes // 16]), dim=1)
        return pairs.view(_PAIR_DTYPES[dtype.itemsize]).flatten()


def rounded_constants(weight: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, columns] -> float8_e4m3fn [rows, columns / block_size] and float32 [rows, 2], the step and the
    mean of each row: what `constants` takes. In the paper 256 constants share a step, whatever rows they are of; here
    no two rows share anything, so that rows can be loaded one by one, and cut over ranks."""
    largest = weight.unflatten(1, (-1, block_size)).abs().amax(dim=2)
    mean = largest.mean(dim=1, keepdim=True)
    offsets = largest - mean
    # A row whose constants are all equal needs no step, but must not divide by zero.
    step = (offsets.abs().amax(dim=1, keepdim=True) / _LARGEST).clamp_min(_SMALLEST)
    return (offsets / step).to(torch.float8_e4m3fn), torch.cat((step, mean), dim=1)


def constants(offsets: torch.Tensor, step_and_mean: torch.Tensor) -> torch.Tensor:
    """float32 [rows, blocks]: the constants that `rounded_constants` encodes."""
    step, mean = step_and_mean.unbind(1)
    return torch.addcmul(mean[:, None], offsets.to(torch.float32), step[:, None])


def packed_codes(weight: torch.Tensor, of_blocks: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns] and [rows, blocks] -> uint8 [rows, columns / 2]. Weights are rounded to the nearest of
    the 16 numbers under the constants as they are held."""
    table = torch.tensor(TABLE, device=weight.device)
    blocks = weight.unflatten(1, (of_blocks.shape[1], -1))
    scale = of_blocks[:, :, None]
    in_units = torch.where(scale == 0, torch.zeros_like(blocks), blocks / scale)
    codes = torch.bucketize(in_units, (table[1:] + table[:-1]) / 2).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4


def written_out(codes: torch.Tensor, of_blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [rows, columns / 2] and float32 [rows, blocks] -> the weights, [rows, columns] in `dtype`."""
    numbers = _pairs(dtype, codes.device).index_select(0, codes.flatten().to(torch.int32)).view(dtype)
    scaled = numbers.view(*of_blocks.shape, -1).mul_(of_blocks.to(dtype).unsqueeze(2))
    return scaled.flatten(1)
