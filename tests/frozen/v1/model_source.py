"""Models by name in one folder: "frozen:llama"."""

from pathlib import Path

from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weights import ModelFiles, ModelSource


class Options(PluginOptions):
    root: Path = Path()


class Frozen(ModelSource):
    contract = (1, 0)
    Options = Options
    preference = -100

    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        path = self.options.root / reference
        if not path.exists():
            raise ModelError(f"there is no {path}: put the model there")
        return ModelFiles(reference=reference, path=path, revision=revision)
