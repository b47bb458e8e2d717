"""A trainer that broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from dovetail import LLM
from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.rl.collective_sender import CollectiveSender
from tests.engine.weights.conftest import told
from tests.engine.weights.senders import Trainer, serve_collective, update_from

BUCKET_BYTES = 64 << 10


@pytest.fixture
def trainer(checkpoints: Mapping[str, Path]) -> Iterator[Callable[..., Trainer]]:
    """Starts one that sends the new weights to so many ranks."""
    started: list[Trainer] = []

    def start(num_ranks: int = 1) -> Trainer:
        started.append(Trainer(serve_collective, checkpoints["new"], num_ranks, BUCKET_BYTES))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_every_rank_gets_what_a_trainer_broadcasts(make: Callable[..., LLM], trainer: Callable[..., Trainer]) -> None:
    """In a group of their own: that of tensor parallelism goes on."""
    llm = make(weight_transport="collective", executor={"name": "multiproc", "tensor_parallel": 2, "threads": 1})
    for _ in range(2):
        assert update_from(llm, trainer(2)) > 2
        for (tokens, log_probs), (others, expected) in zip(told(llm), told(make("new")), strict=True):
            assert (tokens, log_probs) == (others, pytest.approx(expected, abs=1e-5))


def test_old_weights_serve_on_when_the_trainer_is_killed(
    make: Callable[..., LLM], trainer: Callable[[], Trainer]
) -> None:
    """And another trainer's arrive."""
    llm = make(weight_transport="collective")
    old = told(llm)
    killed = trainer()
    llm.init_weight_transfer_engine(killed.pipe.recv())
    llm.start_weight_update()
    llm.update_weights(killed.pipe.recv())
    killed.kill()
    killed.process.join()
    with pytest.raises(ModelError, match="connect again"):
        llm.update_weights({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]})
    llm.abort_weight_update()
    assert told(llm) == old
    assert update_from(llm, trainer()) > 2
    assert told(llm) == told(make("new"))


def test_another_bucket_than_announced_is_refused(make: Callable[..., LLM], trainer: Callable[[], Trainer]) -> None:
    """Before tensors are received, which have other sizes."""
    llm = make(weight_transport="collective")
    sending = trainer()
    llm.init_weight_transfer_engine(sending.pipe.recv())
    llm.start_weight_update()
    info = sending.pipe.recv()
    with pytest.raises(ModelError, match="another bucket"):
        llm.update_weights({**info, "shapes": [[2 * size for size in shape] for shape in info["shapes"]]})
    llm.start_weight_update()
    with pytest.raises(ModelError, match="no trainer is connected"):
        llm.update_weights(info)


def test_a_trainer_that_does_not_come_is_given_up(make: Callable[..., LLM]) -> None:
    llm = make(weight_transport={"name": "collective", "timeout_s": 0.1})
    sender = CollectiveSender("127.0.0.1", world_size=2)
    with pytest.raises(ModelError, match="no group of 2"):
        llm.init_weight_transfer_engine(sender.init_info())
    with pytest.raises(RequestError, match="world_size is 2"):
        llm.init_weight_transfer_engine(sender.init_info(rank_offset=2))
    with pytest.raises(ModelError, match="no workers are connected"):
        next(sender.send([("a", torch.ones(1))]))


def test_nccl_is_refused(make: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="between GPUs"):
        make(weight_transport={"name": "collective", "backend": "nccl"})
