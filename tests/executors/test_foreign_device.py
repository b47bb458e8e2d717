"""An executor for a device that no bundled executor serves, as docs/executors.md tells others to write one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

EXECUTOR = '''\
from concurrent.futures import Future

from dovetail.contracts.executor import Executor, ExecutorCapabilities, Placement


class XPUExecutor(Executor):
    """Speaks of an XPU; there is none here, so its worker computes on the CPU."""

    contract = (1, 0)
    capabilities = ExecutorCapabilities(device_types=frozenset({"xpu"}), enforce_eager=True)

    def start(self):
        self._worker = self.spec.create(Placement(device="cpu"))
        self._worker.load()

    def execute(self, plan):
        future = Future()
        future.set_result(self._worker.execute(plan))
        return future

    def call(self, method, *args):
        return [self._worker.call(method, *args)]

    def shutdown(self):
        self._worker.close()
'''


def test_an_executor_of_others_brings_its_device(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", tiny_config("llama"))
    (tmp_path / "xpu.py").write_text(EXECUTOR)
    sections = {"model": {"path": str(tmp_path / "model"), "tokenizer_mode": "none"}, "cache": {"num_blocks": 50}}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def run(**more: object) -> list[int]:
        with LLM(**sections, **more) as llm:
            return llm.generate([[5, 9]], params, use_tqdm=False)[0].outputs[0].token_ids

    executor = {"name": f"{tmp_path / 'xpu.py'}:XPUExecutor", "enforce_eager": True}
    assert run(device="xpu", executor=executor) == run(device="cpu")
    with pytest.raises(ConfigError, match="CPUExecutor runs on cpu, not on xpu"):
        run(device="xpu")
