"""GRPO with trainer and engine in one process: the engine sleeps while the trainer has the memory.

    python examples/rl/colocated.py MODEL --seeds 5 --output colocated.json

Its weights are discarded in its sleep, since new ones follow; the trainer's go in as tensors of this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo import Clock, Step, Trainer, engine_keywords, groups_of, main, openings_of, sampling, step_of

from dovetail import LLM
from dovetail.rl.training_forward import TrainingForward


def train(path: Path, seed: int, num_steps: int, learning_rate: float, *, strict: bool) -> Iterator[Step]:
    """One run."""
    with LLM(weight_transport="in_process", **engine_keywords(path, strict)) as llm:
        trainer = Trainer(path, learning_rate, TrainingForward(llm.engine.config) if strict else None)
        llm.init_weight_transfer_engine()
        for step in range(num_steps):
            clock = Clock()
            groups = groups_of(llm.generate(openings_of(step), sampling(seed, step), use_tqdm=False))
            llm.sleep(2)
            seconds = [clock.lap()]
            differences = trainer.step(groups)
            seconds.append(clock.lap())
            llm.wake_up(["weights"], for_update=True)
            llm.start_weight_update()
            llm.update_weights({"weights": dict(trainer.weights())})
            llm.finish_weight_update()
            llm.wake_up(["kv_cache"])
            seconds.append(clock.lap())
            yield step_of(groups, differences, seconds)


if __name__ == "__main__":
    main(train, __doc__)
