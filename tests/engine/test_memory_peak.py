"""Loading takes little more memory than what stays, as the operating system counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.testing.tiny_models import save_tiny_model, tiny_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

# The first model pays for what every model shares: libraries, threads, compiled kernels. "5" resets the peak.
CODE = """
import json, re, sys
from dovetail import LLM

def load(path, quantization):
    model = {"path": path, "tokenizer_mode": "none", "max_model_len": 64, "packed_cache_gib": float(sys.argv[4])}
    model["quantization"], model["dtype"] = json.loads(quantization), "float32"
    return LLM(model=model, cache={"num_blocks": 16, "block_size": 16}, executor={"threads": 1})

def memory(name):
    return 1024 * int(re.search(name + r":\\s+([0-9]+) kB", open("/proc/self/status").read())[1])

load(sys.argv[1], sys.argv[3]).shutdown()
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
llm = load(sys.argv[2], sys.argv[3])
print(json.dumps({"peak": memory("VmHWM") - before, "stays": memory("VmRSS") - before}))
"""

_AT_ONCE = 12e6
"""Bytes that rounding a part of a matrix takes, whatever the size of the model: a quarter of this small one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and one of 170 MB in float32 in which no tensor is more than a few of them."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "tiny", tiny_config("llama"))
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 2048, "num_hidden_layers": 10}
    save_tiny_model(folder / "large", tiny_config("llama", **sizes, tie_word_embeddings=False))
    return folder / "tiny", folder / "large"


@pytest.mark.parametrize("quantization", [None, "q8"])
def test_loading_takes_at_most_1_2_times_what_stays(
    models: tuple[Path, Path], quantization: str | None, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", CODE, *map(str, models), json.dumps(quantization), "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["stays"] > 30e6
    assert found["peak"] <= 1.2 * found["stays"] + _AT_ONCE, found
