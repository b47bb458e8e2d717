"""The poolers of a worker, by task."""

from __future__ import annotations

from dovetail.contracts.model import ScoresStates
from dovetail.contracts.pooling import Pooler, PoolerSetup
from dovetail.worker.loaded_model import LoadedModel


def create_poolers(loaded: LoadedModel) -> dict[str, Pooler]:
    """Those that the config chose. Raises `PluginError` where one cannot be made."""
    pooling, plugins = loaded.setup.config.pooling, loaded.setup.plugins
    model = loaded.model
    score = model.score if isinstance(model, ScoresStates) else loaded.head
    return {
        task: plugins.create(component, PoolerSetup(need=pooling.needs[task], score=score))
        for task, component in pooling.poolers.items()
    }
