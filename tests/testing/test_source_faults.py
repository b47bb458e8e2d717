"""What the suite of model sources finds: each a change in a source that passes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import ClassVar

import pytest

from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weights import ModelFiles, ModelSource
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.source_suite import ExistingModel, ModelSourceSuite


class FolderOptions(PluginOptions):
    root: Path = Path()


class Folder(ModelSource):
    """Models by name in one folder, revisions in folders below."""

    contract = (1, 0)
    Options = FolderOptions
    options: FolderOptions

    @classmethod
    def recognizes(cls, reference: str) -> bool:
        return reference.isidentifier()

    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        if not reference.isidentifier():
            raise ModelError(f"{reference!r} is no name of a model: write folder:name")
        path = self.options.root.absolute() / reference / (revision or "main")
        if not os.path.exists(path):
            raise ModelError(f"there is no {path}: put revision {revision or 'main'} of the model there")
        return ModelFiles(reference=reference, path=path, revision=revision)


class FolderSuite(ModelSourceSuite):
    plugin = Folder
    missing = "nothing"

    @pytest.fixture
    def existing(self, tmp_path: Path) -> ExistingModel:
        for revision in ("main", "v2"):
            (tmp_path / "models" / "llama" / revision).mkdir(parents=True)
            (tmp_path / "models" / "llama" / revision / "model.bin").write_bytes(b"weights")
        return ExistingModel("llama", options={"root": tmp_path / "models"}, revision="v2")


class TestFolder(FolderSuite):
    pass


class RelativePath(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        files = super().resolve(reference, revision)
        return ModelFiles(reference, Path(os.path.relpath(files.path)), revision)


class PathsNotFound(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        if not reference.isidentifier():
            return ModelFiles(reference, self.options.root.absolute() / "no-model", revision)
        return super().resolve(reference, revision)


class AddsTheScheme(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        files = super().resolve(reference, revision)
        return ModelFiles(f"folder:{reference}", files.path, revision)


class AlwaysMain(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        return ModelFiles(reference, super().resolve(reference).path, revision)


class DropsTheRevision(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        return ModelFiles(reference, super().resolve(reference, revision).path)


class SaysNo(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        try:
            return super().resolve(reference, revision)
        except ModelError:
            raise ModelError("not found") from None


class RaisesItsOwn(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        path = self.options.root.absolute() / reference / (revision or "main")
        if not path.stat():
            raise ModelError(f"there is no {path}: put the model there")
        return ModelFiles(reference, path, revision)


class LooksAtTheFirstLetter(Folder):
    @classmethod
    def recognizes(cls, reference: str) -> bool:
        return reference[0].isalpha()


class AnswersWithText(Folder):
    @classmethod
    def recognizes(cls, reference: str) -> bool:
        return reference and "yes"  # type: ignore[return-value]


class AsksTheNetwork(Folder):
    @classmethod
    def recognizes(cls, reference: str) -> bool:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=0.1).close()
        except OSError:
            return False
        return reference.isidentifier()


class FoundOnce(Folder):
    count: ClassVar[int] = 0

    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        files = super().resolve(reference, revision)
        type(self).count += 1
        copy = files.path / f"copy-{self.count}"
        copy.mkdir()
        return ModelFiles(reference, copy, revision)


class WritesBesideTheModel(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        files = super().resolve(reference, revision)
        with (files.path / "used").open("a") as log:
            log.write("once more\n")
        return files


class ChangesTheDirectory(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        os.chdir(self.options.root)
        return super().resolve(reference, revision)


class SetsTheEnvironment(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        os.environ["MODELS"] = str(self.options.root)
        return super().resolve(reference, revision)


class Handles(ModelFiles):
    """Cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


class HandsOutWhatStays(Folder):
    def resolve(self, reference: str, revision: str | None = None) -> ModelFiles:
        files = super().resolve(reference, revision)
        return Handles(files.reference, files.path, files.revision)


FAULTS = [
    Fault("returns a relative path", RelativePath, "test_finds_the_model"),
    Fault("returns a path that is not there", PathsNotFound, "test_refuses_odd_references"),
    Fault("changes the reference", AddsTheScheme, "test_finds_the_model"),
    Fault("takes the main revision always", AlwaysMain, "test_no_revision_is_ignored"),
    Fault("drops the revision", DropsTheRevision, "test_finds_its_revision"),
    Fault("does not say what is missing", SaysNo, "test_says_what_is_missing"),
    Fault("raises errors of its own", RaisesItsOwn, "test_refuses_odd_references"),
    Fault("raises where it recognizes", LooksAtTheFirstLetter, "test_recognizes_without_raising"),
    Fault("recognizes with a text", AnswersWithText, "test_recognizes_without_raising"),
    Fault("recognizes over the network", AsksTheNetwork, "test_recognizes_without_network"),
    Fault("finds something else each time", FoundOnce, "test_finds_the_same_again"),
    Fault("writes next to the model", WritesBesideTheModel, "test_leaves_the_model_alone"),
    Fault("changes the working directory", ChangesTheDirectory, "test_leaves_the_process_alone"),
    Fault("sets variables of the environment", SetsTheEnvironment, "test_leaves_the_process_alone"),
    Fault("hands out what cannot travel", HandsOutWhatStays, "test_files_travel"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_source_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())  # and back, after a source that changes the directory
    monkeypatch.setenv("MODELS", "")
    check_fault(fault, FolderSuite, plugin=fault.plugin)
