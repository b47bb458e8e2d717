"""An engine whose executor has other workers than the config asks for: it is refused, and nothing generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail import LLM
from dovetail.contracts.errors import PluginError
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

Start = Callable[[str, int], None]

EXECUTORS = '''\
from concurrent.futures import Future

from dovetail.contracts.executor import Executor, ExecutorCapabilities, Placement, WorkerLayout


class OneWorker(Executor):
    """One worker, whatever it says of itself."""

    contract = (1, 0)
    capabilities = ExecutorCapabilities(device_types=frozenset({"cpu"}), tensor_parallel=None)
    worker = None

    def placement(self):
        return Placement(device="cpu")

    def start(self):
        self.worker = self.spec.create(self.placement())
        self.worker.load()

    def execute(self, plan):
        future = Future()
        future.set_result(self.worker.execute(plan))
        return future

    def call(self, method, *args):
        return [self.worker.call(method, *args)]

    def shutdown(self):
        if self.worker is not None:
            self.worker.close()


class SpeaksForOthers(OneWorker):
    def call(self, method, *args):
        return super().call(method, *args) * self.need.tensor_parallel


class Forgets(OneWorker):
    """Has no answer where there is nothing to say."""

    def call(self, method, *args):
        return [answer for answer in super().call(method, *args) if answer is not None]


class SharesWithNobody(OneWorker):
    """Splits the model, and starts one of the two workers."""

    def placement(self):
        return Placement(device="cpu", layout=WorkerLayout(num_stages=2))


class HidesTheRendezvous(OneWorker):
    def placement(self):
        return Placement(device="cpu", layout=WorkerLayout(tensor_parallel=2))
'''


@pytest.fixture
def start(tmp_path: Path) -> Start:
    three_ways = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}
    save_tiny_model(tmp_path / "model", tiny_config("llama", **three_ways))
    (tmp_path / "executors.py").write_text(EXECUTORS)

    def run(name: str, tensor_parallel: int) -> None:
        executor = {"name": f"{tmp_path}/executors.py:{name}", "tensor_parallel": tensor_parallel}
        with LLM(model={"path": str(tmp_path / "model"), "tokenizer_mode": "none"}, executor=executor):
            raise AssertionError("it starts")

    return run


def test_fewer_workers_than_ranks_are_refused_by_the_name_of_the_executor(start: Start) -> None:
    reason = r"OneWorker' has 1 worker .*executor.tensor_parallel 3 asks for 3 workers"
    with pytest.raises(PluginError, match=reason) as caught:
        start("OneWorker", 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("executor", "tensor_parallel", "reason"),
    [
        ("SpeaksForOthers", 3, r"SpeaksForOthers' breaks .* 1 stages of 1 worker, and 1 stages of 3 workers"),
        ("Forgets", 1, r"Forgets' has 0 workers \(as many answered 'initialize_cache'\)"),
        ("SharesWithNobody", 1, "gave rank 0 of 2 no init_method"),
        ("HidesTheRendezvous", 2, "gave rank 0 of 2 no init_method"),
    ],
)
def test_workers_that_are_elsewhere_are_refused(start: Start, executor: str, tensor_parallel: int, reason: str) -> None:
    with pytest.raises(PluginError, match=reason):
        start(executor, tensor_parallel)
