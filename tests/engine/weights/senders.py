"""A trainer as a process of its own, forked off a server that has torch loaded: it sends a checkpoint's tensors."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dovetail import LLM
from dovetail.rl.collective_sender import CollectiveSender
from dovetail.rl.weight_sender import WeightSender


def serve_ipc(pipe: Connection, checkpoint: Path, num_ranks: int, bucket_bytes: int) -> None:
    """Sends one update and waits for the engine's end of the pipe to be closed."""
    weights = load_file(checkpoint / "model.safetensors")
    with WeightSender(num_ranks, timeout_s=30) as sender:
        pipe.send(sender.init_info())
        for update_info in sender.send(weights.items(), bucket_bytes):
            pipe.send(update_info)
        pipe.send(None)
        pipe.poll(None)


def serve_collective(pipe: Connection, checkpoint: Path, num_ranks: int, bucket_bytes: int) -> None:
    """As `serve_ipc`, by broadcast."""
    weights = load_file(checkpoint / "model.safetensors")
    sender = CollectiveSender("127.0.0.1", world_size=1 + num_ranks, timeout_s=30)
    pipe.send(sender.init_info())
    sender.connect()
    for update_info in sender.send(weights.items(), bucket_bytes):
        pipe.send(update_info)
    pipe.send(None)
    pipe.poll(None)
    sender.close()


def serve_in(serve: Callable[..., None], folder: str, *arguments: Any) -> None:
    """Calls `serve`, with its temporary files in `folder`."""
    tempfile.tempdir = folder
    serve(*arguments)


class Trainer:
    """That process, as the engine's sees it."""

    def __init__(self, serve: Any, checkpoint: Path, *arguments: Any):
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, other = context.Pipe()
        self._folder = tempfile.mkdtemp()  # of what it leaves when it is killed
        started = (serve, self._folder, other, checkpoint, *arguments)
        self.process: BaseProcess = context.Process(target=serve_in, args=started, daemon=True)
        self.process.start()
        other.close()

    def kill(self) -> None:
        """With SIGKILL. Idempotent."""
        self.process.kill()

    def close(self) -> None:
        """Ends it, and waits."""
        self.pipe.close()
        self.process.join(30)
        self.process.kill()
        self.process.join()
        shutil.rmtree(self._folder)


def update_from(llm: LLM, trainer: Trainer) -> int:
    """One whole update; the number of its buckets."""
    llm.init_weight_transfer_engine(trainer.pipe.recv())
    llm.start_weight_update()
    count = 0
    while (update_info := trainer.pipe.recv()) is not None:
        llm.update_weights(update_info)
        count += 1
    llm.finish_weight_update()
    return count
