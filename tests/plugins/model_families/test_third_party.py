"""The decoder of `dovetail.nn` serves families that are not bundled: the example's, in the suite and in an engine."""

from __future__ import annotations

import ast
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.contracts.model import ModelFamily
from dovetail.testing.model_family_suite import ModelFamilySuite
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

FILE = Path(__file__).parents[3] / "examples/arcee.py"


def load_family() -> type[ModelFamily]:
    spec = spec_from_file_location("arcee", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    family: type[ModelFamily] = module.ArceeFamily
    return family


class TestArcee(ModelFamilySuite):
    plugin = load_family()


def test_it_imports_what_is_public() -> None:
    names = {node.module for node in ast.walk(ast.parse(FILE.read_text())) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in names if name is not None and name.startswith("dovetail")}
    assert ours
    assert all(name.startswith(("dovetail.contracts", "dovetail.nn")) for name in ours)


@pytest.mark.parametrize("quantization", [None, "q8"])
def test_an_engine_finds_it_by_its_path(tmp_path: Path, quantization: str | None) -> None:
    """Greedy tokens are transformers' own; and its layers come from `dovetail.nn`, so that they can be quantized."""
    oracle = save_tiny_model(tmp_path, tiny_config("arcee"))
    prompt = list(range(3, 20))
    with LLM(
        config={
            "model": {
                "path": str(tmp_path),
                "family": f"{FILE}:ArceeFamily",
                "tokenizer_mode": "none",
                "dtype": "float32",
                "quantization": quantization,
            },
            "executor": {"name": "cpu", "threads": 1},
            "cache": {"num_blocks": 100},
        }
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == 8
    if quantization is None:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert tokens == expected[0, len(prompt) :].tolist()
