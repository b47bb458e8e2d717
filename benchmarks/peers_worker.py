"""The process of one engine; `peers.py` and `quality.py` start it with the Python of the engine's virtual environment.

    python benchmarks/peers_worker.py SPEC.json

The specification says which engine, and whether to `measure` it (one JSON line on standard output) or to `serve`:
one JSON request a line on standard input, one JSON answer a line on standard output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from peers_lib.base import Engine, EngineSpec, ScoringEngine
from peers_lib.workload import Workload, measure

ENGINES = {
    "dovetail": "dovetail_engine:DovetailEngine",
    "llama.cpp": "llama_cpp_engine:LlamaCppEngine",
    "openvino": "openvino_engine:OpenVINOEngine",
    "vllm": "vllm_engine:VLLMEngine",
    "transformers": "transformers_engine:TransformersEngine",
    "ctranslate2": "ctranslate2_engine:CTranslate2Engine",
}


def claim_stdout() -> TextIO:
    """Standard output for us alone: what engines print goes to standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own


def load(spec: Mapping[str, Any]) -> Engine:
    """The engine of a specification."""
    module, name = ENGINES[spec["engine"]].split(":")
    engine_class = getattr(import_module(f"peers_lib.{module}"), name)
    fields = EngineSpec(spec["engine"], spec["model"], spec["threads"], spec["options"])
    engine: Engine = engine_class(fields)
    return engine


def answer(engine: Engine, request: Mapping[str, Any]) -> dict[str, Any]:
    """Serves one request of `quality.py`."""
    if request["do"] == "generate":
        return {"tokens": engine.generate(request["prompts"], request["num_tokens"])}
    import numpy as np

    assert isinstance(engine, ScoringEngine)
    np.save(request["file"], engine.logits(request["token_ids"]))
    return {"file": request["file"]}


def main() -> None:
    """Loads, then measures or serves."""
    own_stdout = claim_stdout()
    spec = json.loads(Path(sys.argv[1]).read_text())
    engine = load(spec)
    if spec["do"] == "measure":
        workload = Workload(**spec["workload"])
        result = measure(engine, workload, spec["started"], spec["quiet_s"])
        print(json.dumps(result), file=own_stdout, flush=True)
        return
    print(json.dumps({"version": engine.version}), file=own_stdout, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=own_stdout, flush=True)


if __name__ == "__main__":
    # vLLM and others start processes by running this file again.
    main()
