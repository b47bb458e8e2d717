"""The registry finds plugins in metadata, resolves their names in configs, and imports the chosen ones in every
process."""

from dovetail.registry.bootstrap import LoadedPlugins, bootstrap, plugin_hash
from dovetail.registry.components import create_class
from dovetail.registry.entries import Entry
from dovetail.registry.registry import Registry

__all__ = [
    "Entry",
    "LoadedPlugins",
    "Registry",
    "bootstrap",
    "create_class",
    "plugin_hash",
]
