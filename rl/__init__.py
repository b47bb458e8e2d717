"""What trainers of reinforcement learning need beside an engine.

`prefix_tokens`: the next prompt of a conversation, with the token ids that the model itself produced.
`difference`: how far an engine's log probabilities are from a trainer's.
`training_forward`: a trainer's log probabilities with the engine's kernels, so that they do not differ.
`rollout_worker`: `AsyncRolloutWorker`, an engine with the method names of NeMo RL's worker.
`chatlearn_module`: `RolloutModule`, an engine in the shape of ChatLearn's modules.
`weight_sender`: new weights for an engine in another process of the machine.
`collective_sender`: the same for engines on any machines.

Importing this package imports none of them; `from dovetail.rl import AsyncRolloutWorker` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.rl.chatlearn_module import RolloutModule
    from dovetail.rl.module_options import ModuleOptions
    from dovetail.rl.rollout_batch import RolloutOptions
    from dovetail.rl.rollout_worker import AsyncRolloutWorker

__all__ = ["AsyncRolloutWorker", "ModuleOptions", "RolloutModule", "RolloutOptions"]

_HOMES = {
    "AsyncRolloutWorker": "dovetail.rl.rollout_worker",
    "ModuleOptions": "dovetail.rl.module_options",
    "RolloutModule": "dovetail.rl.chatlearn_module",
    "RolloutOptions": "dovetail.rl.rollout_batch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(_HOMES[name]))[name]
