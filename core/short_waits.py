"""How the threads of torch's own operators wait for each other."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping

_SPINS = "5000"
"""50 to 250 microseconds, as processors go, in which most of torch's next operators come. By itself libgomp spins for
milliseconds, in which a neighbour on the machine, or the threads of native kernels, could compute."""
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def short_waits(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process that has not loaded torch yet, with which its threads soon sleep where they
    wait. None where `environment` has the user's own choice."""
    return {} if any(name in environment for name in _CHOICES) else {"GOMP_SPINCOUNT": _SPINS}


@functools.cache
def import_torch() -> bool:
    """Imports torch with short waits, if nobody imported it before. Whether they are short, or as the user chose.

    The environment is read when torch is loaded, and is left as it was.
    """
    added = short_waits(os.environ)
    if added and "torch" in sys.modules:
        return False
    os.environ.update(added)
    try:
        import torch  # noqa: F401
    finally:
        for name in added:
            del os.environ[name]
    return True
