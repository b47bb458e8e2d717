"""Models on local disk: a directory, or the one file that is the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles, ModelSource


class PathSource(ModelSource):
    """``./my-model``, ``/models/llama.gguf``; ``~`` is the home directory."""

    contract = (1, 0)
    preference: ClassVar[int] = 10

    @classmethod
    def recognizes(cls, reference: str) -> bool:
        """Whatever exists, and what is written like a path."""
        return reference.startswith((".", "/", "~")) or os.path.exists(reference)

    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        """See `ModelSource.resolve`; the path comes back absolute."""
        if revision is not None:
            raise ModelError(f"revision {revision!r} cannot be used: a local path has none (model {reference!r})")
        # Of names that no file can have, such as those with a null byte, os.path says that nothing is there; pathlib
        # raises for them.
        path = Path(os.path.expanduser(reference)).absolute()
        if not os.path.exists(path):
            raise ModelError(
                f"no file or directory {path}. For a model of the Hugging Face hub write hf:org/name, "
                "for one in an installed package package:name"
            )
        return ModelFiles(reference=reference, path=path)
