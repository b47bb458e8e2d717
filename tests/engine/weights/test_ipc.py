"""A trainer in another process of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from dovetail import LLM
from dovetail.contracts.errors import ModelError, RequestError
from dovetail.rl.weight_sender import WeightSender
from tests.engine.weights.conftest import told
from tests.engine.weights.senders import Trainer, serve_ipc, update_from

BUCKET_BYTES = 64 << 10


@pytest.fixture
def trainer(checkpoints: Mapping[str, Path]) -> Iterator[Callable[[int], Trainer]]:
    """Starts one that sends the new weights to so many ranks."""
    started: list[Trainer] = []

    def start(num_ranks: int = 1) -> Trainer:
        started.append(Trainer(serve_ipc, checkpoints["new"], num_ranks, BUCKET_BYTES))
        return started[-1]

    yield start
    for one in started:
        one.close()


def mapped_segments() -> list[str]:
    """Of trainers, in this process or under a name that others see."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*maps, *os.listdir("/dev/shm")) if "dovetail-weights" in line]


def test_every_rank_maps_what_a_trainer_sends(make: Callable[..., LLM], trainer: Callable[[int], Trainer]) -> None:
    llm = make(weight_transport="ipc", executor={"name": "multiproc", "tensor_parallel": 2, "threads": 1})
    assert update_from(llm, trainer(2)) > 2
    found, expected = told(llm), told(make("new"))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_old_weights_serve_on_when_the_trainer_is_killed(
    make: Callable[..., LLM], trainer: Callable[[], Trainer]
) -> None:
    """At once, and the next trainer's arrive."""
    llm = make(weight_transport="ipc")
    old = told(llm)
    killed = trainer()
    llm.init_weight_transfer_engine(killed.pipe.recv())
    llm.start_weight_update()
    llm.update_weights(killed.pipe.recv())
    last = killed.pipe.recv()
    killed.kill()
    killed.process.join()
    with pytest.raises(ModelError, match="is gone"):
        llm.update_weights(last)
    llm.abort_weight_update()
    assert (told(llm), mapped_segments()) == (old, [])
    update_from(llm, trainer())
    assert told(llm) == told(make("new"))


def test_a_sender_that_falls_silent_is_given_up(make: Callable[..., LLM]) -> None:
    llm = make(weight_transport={"name": "ipc", "timeout_s": 0.01})
    with WeightSender() as sender:
        llm.init_weight_transfer_engine(sender.init_info())
        llm.start_weight_update()
        with pytest.raises(ModelError, match="timeout_s"):
            llm.update_weights({"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], "bucket": 1})


def test_a_sender_that_closes_is_noticed_though_its_process_lives_on(make: Callable[..., LLM]) -> None:
    llm = make(weight_transport={"name": "ipc", "timeout_s": 20})
    with WeightSender() as sender:
        llm.init_weight_transfer_engine(sender.init_info())
        llm.start_weight_update()
    with pytest.raises(ModelError, match="has closed its connection"):
        llm.update_weights({"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], "bucket": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 2}, "the engine has 1"),
        ({"address": "ipc:///nowhere/socket"}, "nobody listens"),
        ({"address": "tcp://127.0.0.1:1"}, "ipc://PATH"),
        ({"pid": "1"}, "pid"),
    ],
)
def test_odd_ways_to_connect_are_refused(make: Callable[..., LLM], change: Mapping[str, object], message: str) -> None:
    llm = make(weight_transport="ipc")
    with WeightSender() as sender, pytest.raises((RequestError, ModelError), match=message):
        llm.init_weight_transfer_engine({**sender.init_info(), **change})


def test_an_aborted_update_is_followed_by_another(
    make: Callable[..., LLM], new_weights: Mapping[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one sender: what it offered for the first is passed over. Workers that nobody hears of end `send`."""
    llm = make(weight_transport="ipc")
    with WeightSender() as sender:
        llm.init_weight_transfer_engine(sender.init_info())
        llm.start_weight_update()
        offered = sender.send(new_weights.items(), BUCKET_BYTES)
        next(offered)
        with monkeypatch.context() as patches:
            patches.setattr(sender, "_timeout_s", 0.01)
            with pytest.raises(ModelError, match="have read the last bucket"):
                next(offered)
        llm.abort_weight_update()
        llm.start_weight_update()
        for update_info in sender.send(new_weights.items(), BUCKET_BYTES):
            llm.update_weights(update_info)
        llm.finish_weight_update()
    assert told(llm) == told(make("new"))
    assert mapped_segments() == []


def take_rest(llm: LLM, trainer: Trainer) -> None:
    while (update_info := trainer.pipe.recv()) is not None:
        llm.update_weights(update_info)


def test_weights_are_never_half_new(make: Callable[..., LLM], trainer: Callable[[], Trainer]) -> None:
    """A trainer is killed after each number of buckets that the engine took."""
    llm = make(weight_transport="ipc")
    before = told(llm)
    for count in range(update_from(make(weight_transport="ipc"), trainer())):
        killed = trainer()
        llm.init_weight_transfer_engine(killed.pipe.recv())
        llm.start_weight_update()
        for _ in range(count):
            llm.update_weights(killed.pipe.recv())
        killed.kill()
        killed.process.join()
        with pytest.raises((ModelError, EOFError, OSError)):
            take_rest(llm, killed)
        llm.abort_weight_update()
        assert told(llm) == before
        assert mapped_segments() == []
