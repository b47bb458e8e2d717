"""The bundled weight formats under their suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import save_file

from dovetail.plugins.weight_formats.gguf import GGUFFormat
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat
from dovetail.testing.format_suite import SavedCheckpoint, WeightFormatSuite

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1}


class TestSafetensors(WeightFormatSuite):
    """Two shards with an index."""

    plugin = SafetensorsFormat

    @pytest.fixture
    def saved(self, tmp_path: Path) -> SavedCheckpoint:
        root = tmp_path / "model"
        root.mkdir()
        (root / "config.json").write_text(json.dumps(CONFIG))
        tensors = {
            "model.norm.weight": torch.randn(8),
            "model.layers.0.mlp.up_proj.weight": torch.randn(16, 8).bfloat16(),
            "lm_head.weight": torch.randn(32, 8).half(),
        }
        names = list(tensors)
        shards = {"one.safetensors": names[:2], "two.safetensors": names[2:]}
        for shard, inside in shards.items():
            save_file({name: tensors[name] for name in inside}, root / shard)
        places = {name: shard for shard, inside in shards.items() for name in inside}
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return SavedCheckpoint(root, config=CONFIG, tensors=tensors)


class TestSafetensorsFile(WeightFormatSuite):
    """One file."""

    plugin = SafetensorsFormat

    @pytest.fixture
    def saved(self, tmp_path: Path) -> SavedCheckpoint:
        root = tmp_path / "model"
        root.mkdir()
        (root / "config.json").write_text(json.dumps(CONFIG))
        tensors = {"model.norm.weight": torch.randn(8), "lm_head.weight": torch.randn(32, 8)}
        save_file(tensors, root / "model.safetensors")
        return SavedCheckpoint(root / "model.safetensors", config=CONFIG, tensors=tensors)


class TestGGUF(WeightFormatSuite):
    """Packed and plain tensors."""

    plugin = GGUFFormat

    @pytest.fixture
    def saved(self, tmp_path: Path, tiny_model: Any) -> SavedCheckpoint:
        (tmp_path / "model").mkdir()
        generator = np.random.default_rng(0)
        embedding = generator.standard_normal((8, 256), np.float32)
        up = generator.standard_normal((512, 256), np.float32)
        written = {"token_embd.weight": (embedding, Quant.F32), "blk.0.ffn_up.weight": (up, Quant.Q4_0)}
        files = tiny_model(written, name="model/m.gguf")
        blocks = gguf.quants.dequantize(gguf.quants.quantize(up, Quant.Q4_0), Quant.Q4_0)
        tensors = {
            "model.embed_tokens.weight": torch.from_numpy(embedding),
            "model.layers.0.mlp.up_proj.weight": torch.from_numpy(blocks),
        }
        return SavedCheckpoint(files.path, config={"architectures": ["LlamaForCausalLM"]}, tensors=tensors)
