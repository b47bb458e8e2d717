"""The life of a worker, as executors drive it: what it answers when, and how it refuses calls in another order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.load import load_config
from dovetail.contracts.device import Runtime
from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import Placement
from dovetail.contracts.kv import KVLayout, KVSpec
from dovetail.engine.resolving import resolve
from dovetail.executors.gpu.host import late
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.testing.toy_worker import toy_plan
from dovetail.worker.kv_layout import build_layout
from dovetail.worker.model_worker import ModelWorker

BLOCK_SIZE = 8
ANY_LAYOUT = build_layout([KVSpec(num_kv_heads=1, head_size=8, dtype="float32")], BLOCK_SIZE)


@pytest.fixture
def worker(tmp_path: Path) -> ModelWorker:
    save_tiny_model(tmp_path, tiny_config("llama"))
    config = load_config(
        {
            "model": {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32"},
            "cache": {"block_size": BLOCK_SIZE, "num_blocks": 80},
            "executor": "cpu",
        }
    )
    return ModelWorker(resolve(config), Placement(device="cpu", runtime=Runtime(late, graphs="off")))


def start(worker: ModelWorker) -> None:
    layout: KVLayout = build_layout(worker.call("describe").caches, BLOCK_SIZE)
    worker.call("initialize_cache", layout, 80, 0)


def nothing(worker: ModelWorker) -> None:
    return None


LIFE: Mapping[str, Callable[[ModelWorker], Any]] = {
    "created": nothing,
    "loaded": ModelWorker.load,
    "running": start,
    "asleep": lambda worker: worker.call("sleep", 2),
    "awake": lambda worker: worker.call("wake_up"),
    "closed": ModelWorker.close,
}
CALLS: Mapping[str, Callable[[ModelWorker], Any]] = {
    "execute": lambda worker: worker.execute(toy_plan(0)),
    "submit": lambda worker: worker.submit(toy_plan(0)),
    "describe": lambda worker: worker.call("describe"),
    "initialize_cache": lambda worker: worker.call("initialize_cache", ANY_LAYOUT, 80, 0),
    "sleep": lambda worker: worker.call("sleep", 1),
    "forget_finished": lambda worker: worker.call("forget_finished"),
}
STEPS = {"execute", "submit"}
REFUSED: Mapping[str, tuple[set[str], str]] = {
    "created": (set(CALLS), "while the worker has no model: load comes first"),
    "loaded": (STEPS | {"sleep", "forget_finished"}, "before the worker has a KV cache: initialize_cache comes first"),
    "running": (set(), ""),
    "asleep": (STEPS | {"initialize_cache"}, "while the worker sleeps: wake_up comes first"),
    "awake": (set(), ""),
    "closed": (set(CALLS), "while the worker has no model: load comes first, and nothing follows close"),
}


def test_calls_in_another_order_are_refused_and_do_no_harm(worker: ModelWorker) -> None:
    for state, enter in LIFE.items():
        enter(worker)
        refused, why = REFUSED[state]
        for name in refused:
            with pytest.raises(PluginError, match=f"the executor called {name} on rank 0 {why}"):
                CALLS[name](worker)
        assert worker.call("ping") == 0, "answered in any state"
        assert isinstance(worker.call("plugin_hash"), str)


def test_a_worker_that_sleeps_can_be_asked_what_it_holds(worker: ModelWorker) -> None:
    worker.load()
    start(worker)
    report = worker.call("describe")
    worker.call("sleep", 1)
    assert worker.call("describe") == report
    worker.call("forget_finished")


def test_sleeping_twice_and_waking_twice_change_nothing(worker: ModelWorker) -> None:
    """Where a rank failed, the engine asks all again."""
    worker.load()
    start(worker)
    worker.call("wake_up")
    assert worker.call("sleep", 1) > 0
    assert worker.call("sleep", 1) == 0
    worker.call("wake_up")
    worker.call("wake_up")


def test_a_sleep_that_another_rank_cannot_prepare_is_cancelled(worker: ModelWorker) -> None:
    worker.load()
    start(worker)
    worker.call("prepare_sleep", 1, ("weights", "kv_cache"))
    worker.call("cancel_sleep")
    assert worker._running is not None
    assert worker.call("sleep", 2) > 0, "the other level than what was prepared"


def test_closing_may_be_repeated_in_any_state(worker: ModelWorker) -> None:
    worker.close()
    worker.close()


def test_a_sleeping_worker_can_be_closed(worker: ModelWorker) -> None:
    worker.load()
    start(worker)
    worker.call("sleep", 1)
    worker.close()
    with pytest.raises(PluginError):
        worker.call("describe")


@pytest.mark.parametrize("release", [ModelWorker.close, start])
def test_work_under_way_is_done_before_pages_are_freed(
    worker: ModelWorker, release: Callable[[ModelWorker], None]
) -> None:
    """A swap in a stream of its own, say."""
    worker.load()
    start(worker)
    assert worker._running is not None
    device, storage, had_pages = worker._setup.device, weakref.ref(worker._running.storage), []
    device.launch(lambda: had_pages.append(storage() is not None), stream=device.create_stream())
    release(worker)
    assert had_pages == [True]


def test_work_that_fails_does_not_keep_a_worker_from_closing(worker: ModelWorker) -> None:
    """On a device that was lost, all work does."""
    worker.load()
    start(worker)

    def lost() -> None:
        raise RuntimeError("the device is lost")

    worker._setup.device.launch(lost)
    worker.close()
    assert worker._running is None
