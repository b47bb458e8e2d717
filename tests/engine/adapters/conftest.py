"""Adapters of the tiny Llama."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, LoRARequest
from dovetail.testing.tiny_adapters import save_adapter, save_merged

MakeAdapter = Callable[..., LoRARequest]
MakeMerged = Callable[..., LLM]


@pytest.fixture
def make_adapter(tmp_path: Path, tiny_llama: tuple[Path, Any]) -> MakeAdapter:
    """`LoRARequest` of a new adapter of the tiny Llama; arguments as of `save_adapter`."""

    def make(name: str, seed: int = 1, **more: Any) -> LoRARequest:
        return LoRARequest(name, 0, str(save_adapter(tmp_path / name, tiny_llama[0], seed, **more)))

    return make


@pytest.fixture
def make_merged(tmp_path: Path, tiny_llama: tuple[Path, Any], make_llm: Callable[..., LLM]) -> MakeMerged:
    """`LLM` over the tiny Llama with an adapter merged into its weights; sections as of `make_llm`."""

    def make(lora: LoRARequest, **sections: Any) -> LLM:
        directory = tmp_path / f"merged-{lora.lora_name}"
        if not directory.exists():
            save_merged(directory, tiny_llama[0], Path(lora.lora_path))
        return make_llm(model={"path": str(directory)} | sections.pop("model", {}), **sections)

    return make
