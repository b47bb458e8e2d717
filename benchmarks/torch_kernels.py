"""What torch's own CPU kernels for linear layers would take, beside the quantization methods of Dovetail.

    python benchmarks/torch_kernels.py --threads 2

Times one pass over the linear layers of SmolLM2-135M's 30 decoder layers and its output layer, each with weights of its
own, so that they come from memory as in a decode step. Candidates take turns; medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import LinearShape, QuantizationMethod, QuantizationNeed
from dovetail.plugins.quantization.grouped.methods import EightBitMethod, FourBitMethod

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49152, 576)
GROUP = 32

Layer = Callable[[torch.Tensor], torch.Tensor]


def plain(weight: torch.Tensor) -> Layer:
    """F.linear."""
    return lambda x: torch.nn.functional.linear(x, weight)


def mkldnn(weight: torch.Tensor) -> Layer:
    """oneDNN with weights packed once."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def fbgemm(weight: torch.Tensor) -> Layer:
    """quantize_dynamic: int8 activations, one scale per tensor, int8 weights."""
    scales = weight.abs().amax(1) / 127
    zeros = torch.zeros(len(weight), dtype=torch.long)
    rounded = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(rounded, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed)


def int8_pack(weight: torch.Tensor) -> Layer:
    """_weight_int8pack_mm: int8 weights, one scale per row."""
    scales = weight.abs().amax(1) / 127
    rounded = (weight / scales[:, None]).round().to(torch.int8)
    return lambda x: torch._weight_int8pack_mm(x, rounded, scales.to(x.dtype))


def int4_pack(weight: torch.Tensor) -> Layer:
    """_weight_int4pack_mm_for_cpu: 4 bits, groups of 32."""
    rows, columns = weight.shape
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.randint(0, 16, (rows, columns), dtype=torch.int32), 2
    )
    scales = torch.rand(columns // GROUP, rows, 2)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales.to(x.dtype))


def dynamic_four(weight: torch.Tensor) -> Layer:
    """_dyn_quant_matmul_4bit: int8 activations, 4 bits, groups of 32."""
    rows, columns = weight.shape
    values = torch.randint(0, 255, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.rand(rows, columns // GROUP, dtype=torch.bfloat16)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(values, scales, None, GROUP, columns, rows)
    return lambda x: torch.ops.aten._dyn_quant_matmul_4bit(x, packed, GROUP, columns, rows)


def ours(method: type[QuantizationMethod]) -> Callable[[torch.Tensor], Layer]:
    """A method of Dovetail."""
    need = QuantizationNeed("cpu", "float32")
    options = method.Options()
    if reasons := reasons_against(method, need, options, Environment("cpu", 2, 2**30)):
        raise RuntimeError("; ".join(reasons))
    made = method(options, need)

    def create(weight: torch.Tensor) -> Layer:
        kernel = made.create_linear(LinearShape("layer", weight.shape[1], len(weight), False), torch.device("cpu"))
        assert kernel is not None
        kernel.load(slice(0, len(weight)), weight)
        kernel.finish()
        return lambda x: kernel.apply(x, None)

    return create


CANDIDATES: dict[str, tuple[Callable[[], Callable[[torch.Tensor], Layer]], torch.dtype]] = {
    "F.linear float32": (lambda: plain, torch.float32),
    "F.linear bfloat16": (lambda: plain, torch.bfloat16),
    "mkldnn packed float32": (lambda: mkldnn, torch.float32),
    "mkldnn packed bfloat16": (lambda: mkldnn, torch.bfloat16),
    "fbgemm dynamic int8": (lambda: fbgemm, torch.float32),
    "_weight_int8pack_mm bfloat16": (lambda: int8_pack, torch.bfloat16),
    "_weight_int8pack_mm float32": (lambda: int8_pack, torch.float32),
    "_weight_int4pack_mm_for_cpu": (lambda: int4_pack, torch.bfloat16),
    "_dyn_quant_matmul_4bit": (lambda: dynamic_four, torch.float32),
    "dovetail q8": (lambda: ours(EightBitMethod), torch.float32),
    "dovetail q4": (lambda: ours(FourBitMethod), torch.float32),
}


def build(name: str, num_layers: int) -> list[tuple[int, Layer]]:
    """(input size, layer) of the whole model."""
    create, dtype = CANDIDATES[name]
    make = create()
    shapes = SHAPES * num_layers + [HEAD]
    keeps = dtype if make in (plain, mkldnn) else torch.float32
    return [(shape[1], make((0.02 * torch.randn(shape)).to(keeps))) for shape in shapes]


def seconds(layers: list[tuple[int, Layer]], inputs: dict[int, torch.Tensor]) -> float:
    """Of one pass."""
    started = time.perf_counter()
    for size, layer in layers:
        layer(inputs[size])
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    """Measures and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 256])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    models, refused = {}, {}
    for name in CANDIDATES:
        try:
            models[name] = build(name, arguments.layers)
            seconds(models[name], {size: torch.randn(1, size, dtype=CANDIDATES[name][1]) for size in (576, 1536)})
        except (RuntimeError, NotImplementedError) as error:
            models.pop(name, None)
            refused[name] = str(error).splitlines()[0][:160]
    print(f"torch {torch.__version__}, {arguments.threads} threads; milliseconds per pass,")
    print(f"medians of {arguments.repeats} interleaved passes\n")
    print("| kernel | " + " | ".join(f"{rows} rows" for rows in arguments.rows) + " |")
    print("| --- |" + " --- |" * len(arguments.rows))
    table: dict[str, list[float]] = {name: [] for name in models}
    for rows in arguments.rows:
        found: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(arguments.repeats):
            for name, layers in models.items():
                dtype = CANDIDATES[name][1]
                inputs = {size: torch.randn(rows, size, dtype=dtype) for size in (576, 1536)}
                found[name].append(seconds(layers, inputs))
        for name, times in found.items():
            table[name].append(1e3 * statistics.median(times))
    for name, times in table.items():
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in times) + " |")
    for name, reason in refused.items():
        print(f"\n{name}: {reason}")


if __name__ == "__main__":
    main()
