"""The bundled model sources under their suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.plugins.model_sources.hub import HubSource
from dovetail.plugins.model_sources.package import PackageSource
from dovetail.plugins.model_sources.path import PathSource
from dovetail.testing.source_suite import ExistingModel, ModelSourceSuite

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class TestPath(ModelSourceSuite):
    plugin = PathSource

    @pytest.fixture
    def existing(self, tmp_path: Path) -> ExistingModel:
        (tmp_path / "model").mkdir()
        return ExistingModel(str(tmp_path / "model"))


class TestPackage(ModelSourceSuite):
    plugin = PackageSource

    @pytest.fixture
    def existing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExistingModel:
        """A distribution as pip lays it out."""
        info = tmp_path / "one_model-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: one-model\nVersion: 1.0\n")
        (info / "RECORD").write_text("one_model/m.gguf,,\n")
        (tmp_path / "one_model").mkdir()
        (tmp_path / "one_model" / "m.gguf").touch()
        monkeypatch.syspath_prepend(tmp_path)
        return ExistingModel("one-model", revision="1.0")


class TestHub(ModelSourceSuite):
    """Over a cache as the hub's client lays it out; nothing is downloaded."""

    plugin = HubSource
    missing = "acme/no-such-model"

    @pytest.fixture
    def existing(self, tmp_path: Path) -> ExistingModel:
        repository = tmp_path / "models--acme--llama"
        (repository / "refs").mkdir(parents=True)
        for name in ("main", "v2"):
            (repository / "refs" / name).write_text(COMMIT)
        snapshot = repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").touch()
        return ExistingModel("acme/llama", options={"cache_dir": str(tmp_path), "offline": True}, revision="v2")
