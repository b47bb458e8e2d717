"""The lock that the config names: this machine's parts and models must be those of it."""

from __future__ import annotations

from pathlib import Path

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError
from dovetail.engine.locking import compare_with_machine, read_lock
from dovetail.engine.resolving.resolution import Resolution

_KEY = ("lock",)


def settle_lock(state: Resolution) -> None:
    """Makes the lock's path absolute, and reads the file. Raises `ConfigError` where it cannot be read."""
    if state.config.lock is None:
        return
    path = state.layered.base_dir(_KEY) / Path(state.config.lock).expanduser()
    state.decide(_KEY, str(path), "relative to the place where it is given")
    read_lock(path)


def check_lock(state: Resolution, resolved: ResolvedConfig) -> None:
    """Raises `ConfigError` with every difference between the lock that the config names and what was chosen here.
    Informative differences are warnings."""
    if state.config.lock is None:
        return
    path = state.values["lock"]
    differences = compare_with_machine(read_lock(path), resolved, state.registry)
    found = [str(one) for one in differences if not one.is_informative]
    if found:
        listed = "\n".join(f"  - {line}" for line in found)
        raise ConfigError(
            f"lock ({state.layered.origin(_KEY)}): this run is not that of {path}:\n{listed}\n"
            "Install what the lock has, write it again with `dovetail lock`, or leave the key out."
        )
    for one in differences:
        state.warn(f"{path}, for information: {one}")
