"""The poolers of a worker, by task."""

from __future__ import annotations

from dovetail.contracts.pooling import Pooler, PoolerSetup
from dovetail.worker.loaded_model import LoadedModel


def create_poolers(loaded: LoadedModel) -> dict[str, Pooler]:
    """Those that the config chose. Raises `PluginError` where one cannot be made."""
    pooling, plugins = loaded.setup.config.pooling, loaded.setup.plugins
    return {
        task: plugins.create(component, PoolerSetup(need=pooling.needs[task], score=loaded.head))
        for task, component in pooling.poolers.items()
    }
