"""The fused kernels: right, then fast. Each is compared with torch in float64, and its bytes per second with those of a
copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import Arguments, Report, copy_bandwidth, device_seconds, run, seconds_of

from dovetail.contracts.operators import AddsLowRank, Operators
from dovetail.nn.operators import torch_operators
from dovetail.testing.chain_cases import random_chains
from dovetail.testing.low_rank_cases import random_low_rank
from dovetail.worker.sampling.draw import draw
from dovetail.worker.sampling.temperature import truncated_weights

EPS = 1e-5


def create(arguments: Arguments) -> Operators:
    """The set that is checked; in the dry mode torch's own."""
    if arguments.null:
        return torch_operators()
    from dovetail.plugins.operators.triton.operators import TritonOperators

    return TritonOperators(TritonOperators.Options())


def body(report: Report, arguments: Arguments) -> None:
    """Everything, for each dtype."""
    operators = create(arguments)
    dtypes = [torch.float32] if arguments.null else [torch.bfloat16, torch.float16, torch.float32]
    for dtype in dtypes:
        check_rows(report, operators, arguments, dtype)
        if not arguments.null:
            check_draw(report, operators, arguments, dtype)
            check_groups(report, operators, arguments, dtype)
            check_adapters(report, operators, arguments, dtype)
    if not arguments.null:
        check_chains(report, operators, arguments)
    bandwidth = copy_bandwidth(arguments)
    report.add("copy within the device", bandwidth / 1e9, "GB/s")
    measure(report, operators, arguments, bandwidth)


def check_rows(report: Report, operators: Operators, arguments: Arguments, dtype: torch.dtype) -> None:
    """Norms, activation and rotation over rows of an 8B model."""
    rows, size = (7, 64) if arguments.null else (129, 4096)
    x, residual = random(arguments, rows, size, dtype=dtype), random(arguments, rows, size, dtype=dtype)
    weight = random(arguments, size, dtype=dtype)
    compare(report, f"rms_norm {dtype}", operators.rms_norm(x, weight, EPS), norm(x, weight), 2)
    total = x + residual
    normed, summed = operators.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    compare(report, f"add_rms_norm {dtype}", normed, norm(total, weight), 2)
    report.add(f"add_rms_norm's sum {dtype}", "equal", good=bool(torch.equal(summed, total)))
    gate_up = random(arguments, rows, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    compare(report, f"silu_mul {dtype}", operators.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, 3)
    heads = random(arguments, rows, 40, 128, dtype=dtype)
    cos, sin = random(arguments, rows, 2, 1, 128, dtype=dtype).unbind(1)
    wide = heads.double()
    turned = wide * cos.double() + wide.roll(64, -1) * sin.double()
    scale = (wide * cos.double()).abs() + (wide.roll(64, -1) * sin.double()).abs()
    compare(report, f"rotate {dtype}", operators.rotate(heads.clone(), cos, sin), turned, 3, scale)


def check_draw(report: Report, operators: Operators, arguments: Arguments, dtype: torch.dtype) -> None:
    """The same tokens as the host's own draw, but for rows where a rounding decides."""
    rows, vocab_size = 256, 128256
    logits = random(arguments, rows, vocab_size, dtype=dtype) * 3
    params, uniforms = parameters(arguments, rows, vocab_size)
    drawn = operators.draw(logits, *params, uniforms)
    weights = truncated_weights(logits.float(), *params)
    assert drawn is not None
    kept = (weights.gather(1, drawn[:, None])[:, 0] > 0).float().mean().item()
    same = (drawn == draw(weights, uniforms)).float().mean().item()
    report.add(f"draw {dtype}: tokens that may be drawn", kept, good=kept == 1.0)
    report.add(f"draw {dtype}: tokens equal to the host's", same, good=same >= 0.98)


def check_groups(report: Report, operators: Operators, arguments: Arguments, dtype: torch.dtype) -> None:
    """Experts with many, few and no rows."""
    counts = [0, 1, 17, 130, 64, 0, 3, 41]
    x = random(arguments, sum(counts), 512, dtype=dtype)
    weight = random(arguments, len(counts), 384, 512, dtype=dtype) * 0.05
    starts = torch.tensor([0, *counts], device=arguments.device).cumsum(0).int()
    parts = [part.double() @ weight[i].double().T for i, part in enumerate(x.split(counts))]
    expected = torch.cat(parts)
    scale: Any = expected.std()
    if dtype == torch.float32:  # the order of a float32 sum, relative to what is summed
        sums = [part.abs().double() @ weight[i].abs().double().T for i, part in enumerate(x.split(counts))]
        scale = torch.cat(sums)
    compare(report, f"grouped_linear {dtype}", operators.grouped_linear(x, weight, starts), expected, 8, scale)


def check_adapters(report: Report, operators: Operators, arguments: Arguments, dtype: torch.dtype) -> None:
    """Rows of several adapters and of none, alone and together."""
    assert isinstance(operators, AddsLowRank)
    slots = [i * i % 7 - 1 for i in range(64)] + [2] * 200
    case = random_low_rank(slots, 1000, [512, 130, 130], [16, 16, 2, 7, 16, 9], 16).to(dtype, str(arguments.device))
    y, *others = case.arguments
    operators.add_low_rank(y, *others)
    expected, scale = case.expected()
    compare(report, f"add_low_rank {dtype}", y, expected, 2, scale)
    alone = []
    for row in range(0, len(slots), 9):
        one, *others = case.only(slice(row, row + 1)).arguments
        operators.add_low_rank(one, *others)
        alone.append(torch.equal(one[0], y[row]))
    report.add(f"add_low_rank {dtype}: rows with the same bits alone", sum(alone) / len(alone), good=all(alone))


def measure_adapters(report: Report, operators: Operators, arguments: Arguments) -> None:
    """Beside the multiplication that adapters of rank 16 are added to."""
    assert isinstance(operators, AddsLowRank)
    size, dtype, device = 4096, arguments.dtype, arguments.device
    weight = random(arguments, size, size, dtype=dtype)
    for rows in (1, 64, 4096):
        slots = [i % 8 for i in range(rows)] if rows <= 64 else [i * 8 // rows for i in range(rows)]
        case = random_low_rank(slots, size, [size], [16] * 8, 16).to(dtype, str(device))
        given = case.arguments
        base = seconds_of(lambda x=given[1]: torch.nn.functional.linear(x, weight), device)
        added = seconds_of(lambda given=given: operators.add_low_rank(*given), device)
        report.add(f"add_low_rank, {rows} rows of 8 adapters: share of the multiplication's time", added / base)


def check_chains(report: Report, operators: Operators, arguments: Arguments) -> None:
    """The same nodes and tokens as the contract's words give, chain by chain on the CPU."""
    chains = random_chains([4, 1, 6, 0, 2, 17, 3, 5] * 4, 128256)
    accepted, tokens = operators.accept_chains(*(each.to(arguments.device) for each in chains.arguments))
    pairs = zip(zip(accepted.tolist(), tokens.tolist(), strict=True), chains.expected(), strict=True)
    same = [one == other for one, other in pairs]
    report.add("accept_chains: chains judged as in float64", sum(same) / len(same), good=all(same))


def measure(report: Report, operators: Operators, arguments: Arguments, bandwidth: float) -> None:
    """Bytes that must move per second, as a share of the copy's."""
    rows, size = (16, 64) if arguments.null else (4096, 4096)
    dtype, device = arguments.dtype, arguments.device
    x, residual = random(arguments, rows, size, dtype=dtype), random(arguments, rows, size, dtype=dtype)
    weight, gate_up = random(arguments, size, dtype=dtype), random(arguments, rows, 4 * size, dtype=dtype)
    heads = random(arguments, rows, 40, 128, dtype=dtype)
    cos, sin = random(arguments, rows, 2, 1, 128, dtype=dtype).unbind(1)
    row = rows * size * x.itemsize
    cases: dict[str, tuple[int, Callable[[], Any]]] = {
        "rms_norm": (2 * row, lambda: operators.rms_norm(x, weight, EPS)),
        "add_rms_norm": (4 * row, lambda: operators.add_rms_norm(x, residual, weight, EPS)),
        "silu_mul": (6 * row, lambda: operators.silu_mul(gate_up)),
        "rotate": (2 * heads.numel() * x.itemsize, lambda: operators.rotate(heads, cos, sin)),
    }
    for name, (num_bytes, work) in cases.items():
        share = num_bytes / device_seconds([work], device) / bandwidth
        report.add(f"{name}, {rows} rows: share of copy bandwidth", share, goal="at least 0.7", good=share >= 0.7)
    if not arguments.null:
        measure_chains(report, operators, arguments, bandwidth)
        measure_adapters(report, operators, arguments)
        logits = random(arguments, 256, 128256, dtype=torch.float32)
        params, uniforms = parameters(arguments, 256, 128256)
        fused = device_seconds([lambda: operators.draw(logits, *params, uniforms)], device)
        report.add("draw, 256 rows, top_k and top_p", 1e3 * fused, "ms")
        whole = seconds_of(lambda: draw(truncated_weights(logits, *params), uniforms), device)
        report.add("the same in torch", 1e3 * whole, "ms")


def measure_chains(report: Report, operators: Operators, arguments: Arguments, bandwidth: float) -> None:
    """Of each chain one row of the target and one of the draft must be read, whichever node is refused."""
    chains, nodes, vocab_size, device = 128, 4, 128256, arguments.device
    target = random(arguments, chains * (nodes + 1), vocab_size, dtype=torch.float32).softmax(-1)
    draft = random(arguments, chains * nodes, vocab_size, dtype=torch.float32).softmax(-1)
    starts = torch.arange(chains + 1, device=device, dtype=torch.int32) * nodes
    uniforms = torch.rand(len(target), dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(device)
    given = target, draft, draft.argmax(-1), starts, uniforms[: len(draft)].contiguous(), uniforms
    accepted, _ = operators.accept_chains(*given)
    rows = 2 * chains - int((accepted == nodes).sum())
    share = rows * vocab_size * 4 / device_seconds([lambda: operators.accept_chains(*given)], device) / bandwidth
    report.add(
        f"accept_chains, {chains} chains of {nodes}: share of bandwidth", share, goal="at least 0.5", good=share >= 0.5
    )


def parameters(
    arguments: Arguments, rows: int, vocab_size: int
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """temperature, min_p, top_k and top_p of requests that truncate in different ways, and their uniforms."""
    device = arguments.device
    top_k = torch.tensor([vocab_size, 50, 1, 7], device=device).repeat(rows // 4)
    top_p = torch.tensor([1.0, 0.9, 0.95, 0.5, 1.0, 0.99, 0.8, 1.0], dtype=torch.float64, device=device)
    min_p = torch.tensor([0.0, 0.05], device=device).repeat(rows // 2)
    temperature = torch.full((rows,), 0.8, device=device)
    generator = torch.Generator().manual_seed(5)
    uniforms = torch.rand(rows, dtype=torch.float64, generator=generator).to(device)
    return (temperature, min_p, top_k, top_p.repeat(rows // 8)), uniforms


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def random(arguments: Arguments, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """The same for the same shape."""
    generator = torch.Generator(arguments.device).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=arguments.device).to(dtype)


def compare(
    report: Report, what: str, actual: torch.Tensor, expected: torch.Tensor, roundings: float, scale: Any = 0.0
) -> None:
    """Largest error in roundings of the dtype, relative to the value or to `scale`. Below the smallest normal number
    the dtype's steps get no smaller."""
    limits = torch.finfo(actual.dtype)
    magnitude = expected.abs().maximum(torch.as_tensor(scale, dtype=torch.float64, device=expected.device))
    worst = ((actual.double() - expected).abs() / (limits.eps * magnitude.clamp_min(limits.tiny))).max().item()
    allowed = max(roundings, 16) if actual.dtype == torch.float32 else roundings
    report.add(f"{what}: largest error", worst, "roundings", goal="", good=worst <= allowed)


if __name__ == "__main__":
    run("operators", body)
