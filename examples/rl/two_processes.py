"""GRPO with trainer and engine as two processes: weights go over in shared memory.

    python examples/rl/two_processes.py MODEL --seeds 5 --output two_processes.json

The trainer drives. What it asks of the engine, and the handles of the weights, go through a pipe.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo import Clock, Rollout, Step, Trainer, engine_keywords, groups_of, main, openings_of, sampling, step_of

from dovetail import LLM
from dovetail.rl.training_forward import TrainingForward
from dovetail.rl.weight_sender import WeightSender

BUCKET_BYTES = 16 << 20


def serve(trainer: Connection, path: Path, strict: bool) -> None:
    """The process of the engine, until the trainer closes the pipe."""
    with LLM(weight_transport="ipc", **engine_keywords(path, strict)) as llm:

        def roll_out(seed: int, step: int) -> list[list[Rollout]]:
            return groups_of(llm.generate(openings_of(step), sampling(seed, step), use_tqdm=False))

        calls = {
            "roll_out": roll_out,
            "init_weight_transfer_engine": llm.init_weight_transfer_engine,
            "start_weight_update": llm.start_weight_update,
            "update_weights": llm.update_weights,
            "finish_weight_update": llm.finish_weight_update,
        }
        try:
            while True:
                name, arguments = trainer.recv()
                trainer.send(calls[name](*arguments))
        except EOFError:
            return


class Engine:
    """The engine, as the trainer sees it. What goes wrong there ends its process, and shows as `EOFError` here."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def call(self, name: str, *arguments: Any) -> Any:
        """What the call returns."""
        self._connection.send((name, arguments))
        return self._connection.recv()


@contextmanager
def started(path: Path, strict: bool) -> Iterator[Engine]:
    """An engine in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, path, strict))
    process.start()
    theirs.close()
    try:
        yield Engine(ours)
    finally:
        ours.close()
        process.join()


def train(path: Path, seed: int, num_steps: int, learning_rate: float, *, strict: bool) -> Iterator[Step]:
    """One run."""
    forward = TrainingForward.from_config(**engine_keywords(path, strict)) if strict else None
    trainer = Trainer(path, learning_rate, forward)
    with started(path, strict) as engine, WeightSender() as sender:
        engine.call("init_weight_transfer_engine", sender.init_info())
        for step in range(num_steps):
            clock = Clock()
            groups = engine.call("roll_out", seed, step)
            seconds = [clock.lap()]
            differences = trainer.step(groups)
            seconds.append(clock.lap())
            engine.call("start_weight_update")
            for update_info in sender.send(trainer.weights(), BUCKET_BYTES):
                engine.call("update_weights", update_info)
            engine.call("finish_weight_update")
            seconds.append(clock.lap())
            yield step_of(groups, differences, seconds)


if __name__ == "__main__":
    main(train, __doc__)
