"""What machine this is, and whether its parts fit together."""

from __future__ import annotations

import platform
from importlib import metadata

import torch
from common import Arguments, Report, run


def body(report: Report, arguments: Arguments) -> None:
    """Versions, device, and a first kernel of torch and of Triton."""
    report.add("python", platform.python_version())
    report.add("torch", torch.__version__)
    report.add("CUDA of torch", str(torch.version.cuda))
    for name in ("triton", "transformers", "safetensors", "pydantic", "pluggy", "gguf"):
        try:
            report.add(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            report.add(name, "missing", good=None if name in ("triton", "gguf") else False)
    if arguments.null:
        return
    report.add("torch sees a GPU", str(torch.cuda.is_available()), good=torch.cuda.is_available())
    properties = torch.cuda.get_device_properties(0)
    report.add(properties.name, f"sm_{properties.major}{properties.minor}")
    free, total = torch.cuda.mem_get_info()
    report.add("memory", total / 2**30, "GiB")
    report.add("memory that is free", free / 2**30, "GiB", goal="at least 0.9 of all", good=free > 0.9 * total)
    total_sum = torch.ones(1000, device="cuda").sum().item()
    report.add("torch computes", total_sum, good=total_sum == 1000)
    from dovetail.plugins.operators.triton.operators import TritonOperators

    y = TritonOperators(TritonOperators.Options()).silu_mul(torch.ones(1, 2, device="cuda"))
    report.add("Triton compiles and computes", y.item(), good=abs(y.item() - 0.7310586) < 1e-5)


if __name__ == "__main__":
    run("machine", body)
