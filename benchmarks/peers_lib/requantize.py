"""Requantizes a GGUF file with llama.cpp. Usage: requantize.py IN OUT TYPE (q4_0, q8_0 or bf16)."""

from __future__ import annotations

import sys

import llama_cpp

TYPES = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
}


def main() -> None:
    """Writes OUT."""
    source, target, name = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = TYPES[name]
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params) != 0:
        raise SystemExit(f"llama.cpp could not make {target}")


if __name__ == "__main__":
    main()
