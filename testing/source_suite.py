"""Conformance suite of model sources. A third party's test is a subclass::

    from dovetail.testing import ExistingModel, ModelSourceSuite

    class TestMySource(ModelSourceSuite):
        plugin = MySource

        @pytest.fixture
        def existing(self, tmp_path):
            (tmp_path / "llama").mkdir()
            return ExistingModel("llama", options={"root": tmp_path})

No network is needed: lay the model out where the source looks for it. A model that is there already needs no fixture:
`reference` names it, and `options` are what the config gives. For a source that takes the path of any folder, nothing
is needed but `plugin`.
"""

from __future__ import annotations

import pickle
import socket
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles, ModelSource
from dovetail.testing._checks import leaves_files_alone, leaves_process_alone
from dovetail.testing.suite import SUITES, PluginSuite, overrides

ODD_REFERENCES = {
    "empty": "",
    "a space": " ",
    "a null byte": "a\0b",
    "half a surrogate": "a\ud800",
    "a long name": "a" * 300,
    "many parts": "a/" * 2000,
    "above the root": "../" * 50,
    "the home of nobody": "~no-such-user/model",
    "a scheme": "other:thing",
    "letters of elsewhere": "моделі/модель",
    "a pattern": "[a-",
}
"""What users type; no source has such models."""


@dataclass(frozen=True)
class ExistingModel:
    """A model that the source finds."""

    reference: str
    """Without the scheme."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the source in the config, besides the suite's."""
    revision: str | None = None
    """One that the model has; None where the source knows no revisions."""


class ModelSourceSuite(PluginSuite):
    """Tests of every model source."""

    kind: ClassVar[str] = "model_source"
    plugin: ClassVar[type[ModelSource]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the source in the config."""
    reference: ClassVar[str | None] = None
    """Of a model that the source finds, without the scheme. None: of a folder, for a source that takes paths."""
    revision: ClassVar[str | None] = None
    """One that the model has; None where the source knows no revisions."""
    missing: ClassVar[str] = "no-such-model"
    """A reference in the source's form to what does not exist."""

    @classmethod
    def reason_incomplete(cls) -> str | None:
        """A source needs a model that it finds."""
        if reason := super().reason_incomplete():
            return reason
        has_model = overrides(cls, ModelSourceSuite, "existing") or cls.reference is not None
        # A folder of any name, as `existing` makes it: a source that recognizes it takes paths.
        if has_model or cls.plugin.recognizes(tempfile.gettempdir()):
            return None
        return f"{cls.__name__} needs {SUITES[cls.kind].needs}"

    @pytest.fixture
    def existing(self, tmp_path: Path) -> ExistingModel:
        """The model of `reference`, or a folder. Override it to lay a model out for the test."""
        if self.reference is not None:
            return ExistingModel(self.reference, revision=self.revision)
        (tmp_path / "model").mkdir()
        return ExistingModel(str(tmp_path / "model"))

    @pytest.fixture
    def source(self, existing: ExistingModel) -> ModelSource:
        """As the host creates it."""
        return self._create(existing)

    def test_finds_the_model(self, source: ModelSource, existing: ExistingModel) -> None:
        """An absolute path that exists, with the reference as it was written."""
        files = source.resolve(existing.reference)
        assert isinstance(files, ModelFiles)
        assert files.reference == existing.reference
        assert files.path.is_absolute(), f"{files.path} depends on the working directory"
        assert files.path.exists()

    def test_finds_its_revision(self, source: ModelSource, existing: ExistingModel) -> None:
        """The files say which revision was asked for."""
        if existing.revision is None:
            pytest.skip(f"{self.plugin.__name__} knows no revisions")
        files = source.resolve(existing.reference, existing.revision)
        assert files.revision == existing.revision
        assert files.path.exists()

    def test_no_revision_is_ignored(self, source: ModelSource, existing: ExistingModel) -> None:
        """One that does not exist, or that the source cannot use, is refused."""
        with pytest.raises(ModelError) as caught:
            source.resolve(existing.reference, "no-such-revision")
        assert "no-such-revision" in str(caught.value), "the message does not name the revision"

    def test_says_what_is_missing(self, source: ModelSource) -> None:
        """With a `ModelError` that names the reference, where it was searched for, and what to do."""
        with pytest.raises(ModelError) as caught:
            source.resolve(self.missing)
        message = str(caught.value)
        assert self.missing in message
        assert len(message) - len(self.missing) > 20, f"the message does not say what to do: {message}"

    @pytest.mark.parametrize("kind", ODD_REFERENCES)
    def test_refuses_odd_references(self, source: ModelSource, kind: str) -> None:
        """With a `ModelError`, or it finds something that exists."""
        with suppress(ModelError):
            files = source.resolve(ODD_REFERENCES[kind])
            assert files.path.is_absolute()
            assert files.path.exists(), f"{files.path} does not exist"

    @pytest.mark.parametrize("kind", ODD_REFERENCES)
    def test_recognizes_without_raising(self, kind: str) -> None:
        """The host asks every source about every reference without scheme."""
        answer = self.plugin.recognizes(ODD_REFERENCES[kind])
        assert type(answer) is bool, f"recognizes returned {answer!r}"

    def test_recognizes_without_network(self, existing: ExistingModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """`recognizes` is called for models of other sources too."""

        def refuse(*arguments: object) -> NoReturn:
            raise AssertionError("recognizes opened a connection")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        for reference in (existing.reference, self.missing, "org/name"):
            self.plugin.recognizes(reference)

    def test_finds_the_same_again(self, existing: ExistingModel) -> None:
        """Every process resolves by itself, and all must read the same files."""
        sources = [self._create(existing) for _ in range(2)]
        found = [source.resolve(existing.reference, existing.revision) for source in sources * 2]
        assert len(set(found)) == 1, f"found {found}"

    def test_finds_it_from_elsewhere(
        self, source: ModelSource, existing: ExistingModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A path that was found holds after the working directory has changed."""
        path = source.resolve(existing.reference).path
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert path.exists()

    def test_is_asked_by_several_threads(self, source: ModelSource, existing: ExistingModel) -> None:
        """Engines of one process may start at the same time."""
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: source.resolve(existing.reference), range(8)))
        assert len(set(found)) == 1, f"found {found}"

    def test_files_travel(self, source: ModelSource, existing: ExistingModel) -> None:
        """Workers are processes of their own: they get the files by pickle."""
        files = source.resolve(existing.reference)
        assert pickle.loads(pickle.dumps(files)) == files

    def test_leaves_the_model_alone(self, source: ModelSource, existing: ExistingModel) -> None:
        """It was there before, and others may read it."""
        path = source.resolve(existing.reference).path
        with leaves_files_alone(path):
            source.resolve(existing.reference)

    def test_leaves_the_process_alone(self, source: ModelSource, existing: ExistingModel) -> None:
        """Working directory, environment and import path are not the source's."""
        with leaves_process_alone():
            self.plugin.recognizes(existing.reference)
            source.resolve(existing.reference)
            with pytest.raises(ModelError):
                source.resolve(self.missing)

    def _create(self, existing: ExistingModel) -> ModelSource:
        return self.plugin(self.plugin.Options.model_validate({**self.options, **existing.options}))
