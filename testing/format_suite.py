"""Conformance suite of weight formats. A third party's test is a subclass::

    from dovetail.testing import SavedCheckpoint, WeightFormatSuite

    class TestMyFormat(WeightFormatSuite):
        plugin = MyFormat

        @pytest.fixture
        def saved(self, tmp_path):
            tensors = {"model.norm.weight": torch.randn(8)}
            save(tmp_path / "model.mine", CONFIG, tensors)
            return SavedCheckpoint(tmp_path / "model.mine", config=CONFIG, tensors=tensors)

The checkpoint should have what the format can hold: several tensors, packed ones among them, and several files.

No fixture is needed where `save` is a function that writes a checkpoint::

    def save(folder, config, tensors):
        numpy.savez(folder / "model.npz", **{"config.json": json.dumps(config)}, **tensors)
        return folder / "model.npz"

or `checkpoint` names one that is there, and `expected` the same model as safetensors; nor for a format that reads
folders of safetensors.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer

from dovetail.contracts.errors import ModelError
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.weights import ModelFiles, PackedTensor, WeightFormat, WeightReader
from dovetail.testing import _checkpoints as checkpoints
from dovetail.testing._checks import leaves_files_alone
from dovetail.testing.suite import SUITES, PluginSuite, overrides

FOREIGN = {
    "empty": b"",
    "text": b"a text, no model",
    "JSON": b'{"a": 1}',
    "a GGUF header": b"GGUF\x03\0\0\0" + b"\xff" * 64,
    "a safetensors header": (1 << 62).to_bytes(8, "little") + b"{",
    "a zip header": b"PK\x03\x04" + b"\0" * 64,
    "a pickle": b"\x80\x04K\x01.",
}
"""Contents of files of other kinds, broken ones among them."""
CUTS = {"empty": 0.0, "one byte": 1e-9, "a tenth": 0.1, "half": 0.5, "all but one byte": 1.0}
"""Parts of a file that are left."""
Save = Callable[[Path, Mapping[str, Any], Mapping[str, torch.Tensor]], Path]
"""(an empty folder, config with the keys of Hugging Face's config.json, tensors by their Hugging Face names) -> the
checkpoint that was written: the folder, or a file in it."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written for the test."""

    path: Path
    """Its directory, or its one file."""
    config: Mapping[str, Any]
    """Keys of the config that must come back."""
    tensors: Mapping[str, torch.Tensor]
    """All tensors that must come back, by their Hugging Face names; for packed ones the values that the blocks encode,
    in float32."""
    tolerance: Mapping[str, float] = field(default_factory=dict)
    """Largest absolute error of tensors that do not come back bit for bit."""
    is_known: bool = True
    """Whether config and tensors are known from elsewhere. False: the format read them, and tests can only compare one
    reading with another."""

    @property
    def files(self) -> ModelFiles:
        """As a model source finds it."""
        return ModelFiles(reference=str(self.path), path=self.path)


class WeightFormatSuite(PluginSuite):
    """Tests of every weight format."""

    kind: ClassVar[str] = "weight_format"
    plugin: ClassVar[type[WeightFormat]]
    function_attributes: ClassVar[frozenset[str]] = frozenset({"save"})
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the format in the config."""
    save: ClassVar[Save | None] = None
    """Writes a checkpoint of this format."""
    checkpoint: ClassVar[str | Path | None] = None
    """A checkpoint of this format, a folder or one file. Each test copies it: take a small one."""
    expected: ClassVar[str | Path | None] = None
    """Folder of the same model as config.json and safetensors. None: what is read of `checkpoint` is only compared
    with what is read again, and the tests of values say so."""
    tolerance: ClassVar[float] = 0.0
    """Largest absolute error of tensors from `save` or `expected`; 0: they come back bit for bit."""

    @classmethod
    def reason_incomplete(cls) -> str | None:
        """A format needs a checkpoint."""
        if reason := super().reason_incomplete():
            return reason
        if overrides(cls, WeightFormatSuite, "saved") or cls.save is not None:
            return None
        if cls.checkpoint is not None:
            return checkpoints.reason_against_paths(
                Path(cls.checkpoint), None if cls.expected is None else Path(cls.expected)
            )
        with tempfile.TemporaryDirectory() as folder:
            path = checkpoints.save_safetensors(Path(folder), checkpoints.CONFIG, checkpoints.random_tensors())
            if cls.plugin.recognizes(ModelFiles(reference=folder, path=path)):
                return None
        return f"{cls.__name__} needs {SUITES[cls.kind].needs}"

    @pytest.fixture
    def saved(self, tmp_path: Path) -> SavedCheckpoint:
        """A checkpoint of this format below `tmp_path`: what `save` writes, a copy of `checkpoint`, or safetensors.
        Override it to write one."""
        folder = tmp_path / "model"
        folder.mkdir()
        if self.checkpoint is not None:
            path = checkpoints.copy_checkpoint(Path(self.checkpoint), folder)
            if self.expected is None:
                return _read(self._create(), path)
            config, tensors = checkpoints.read_checkpoint(Path(self.expected))
        else:
            save = type(self).save or checkpoints.save_safetensors
            config, tensors = dict(checkpoints.CONFIG), checkpoints.random_tensors()
            path = save(folder, dict(config), dict(tensors))
        return SavedCheckpoint(path, checkpoints.compared(config), tensors, dict.fromkeys(tensors, self.tolerance))

    @pytest.fixture
    def format(self) -> WeightFormat:
        """As the host creates it."""
        return self._create()

    @pytest.fixture
    def reader(self, format: WeightFormat, saved: SavedCheckpoint) -> Iterator[WeightReader]:
        """The open checkpoint."""
        with closing(format.open(saved.files)) as reader:
            yield reader

    def test_recognizes_its_own(self, saved: SavedCheckpoint) -> None:
        """With True, not with what passes for it."""
        assert self.plugin.recognizes(saved.files) is True

    @pytest.mark.parametrize("content", FOREIGN)
    def test_does_not_recognize_others(self, content: str, tmp_path: Path) -> None:
        """Every format is asked about every file; none may raise."""
        path = tmp_path / "foreign.bin"
        path.write_bytes(FOREIGN[content])
        answer = self.plugin.recognizes(ModelFiles(reference=str(path), path=path))
        assert type(answer) is bool, f"recognizes returned {answer!r}"
        if not content.startswith("a "):
            assert answer is False

    def test_does_not_recognize_what_is_not_there(self, tmp_path: Path) -> None:
        """A missing file and an empty directory."""
        (tmp_path / "empty").mkdir()
        for path in (tmp_path / "empty", tmp_path / "missing", tmp_path / ("a" * 300)):
            assert self.plugin.recognizes(ModelFiles(reference=str(path), path=path)) is False

    @pytest.mark.parametrize("content", FOREIGN)
    def test_refuses_others(self, format: WeightFormat, content: str, tmp_path: Path) -> None:
        """A user may name a format for a file that is none: a `ModelError` that names the file."""
        path = tmp_path / "foreign.bin"
        path.write_bytes(FOREIGN[content])
        files = ModelFiles(reference=str(path), path=path)
        for use in (format.config, format.open):
            with pytest.raises(ModelError) as caught:
                use(files)
            assert str(path) in str(caught.value) or str(tmp_path) in str(caught.value)

    def test_gives_the_config(self, format: WeightFormat, saved: SavedCheckpoint) -> None:
        """With the keys of Hugging Face's config.json, as data that JSON can hold."""
        config = format.config(saved.files)
        assert {key: config.get(key) for key in saved.config} == dict(saved.config)
        assert isinstance(config.get("generation_config"), Mapping), "no generation_config"
        json.dumps(dict(config))
        _require_known(saved)

    def test_gives_each_caller_a_config_of_his_own(self, format: WeightFormat, saved: SavedCheckpoint) -> None:
        """One that is changed does not change the next."""
        first = dict(format.config(saved.files))
        for value in first.values():
            if isinstance(value, dict):
                value["changed"] = True
        first.clear()
        assert {key: format.config(saved.files).get(key) for key in saved.config} == dict(saved.config)
        assert "changed" not in format.config(saved.files)["generation_config"]

    def test_gives_a_tokenizer_that_loads(self, format: WeightFormat, saved: SavedCheckpoint) -> None:
        """Or None, for a checkpoint that has none."""
        tokenizer = format.tokenizer(saved.files)
        if tokenizer is None:
            pytest.skip("the checkpoint has no tokenizer")
        assert (tokenizer.directory is None) != (tokenizer.tokenizer_json is None)
        if tokenizer.tokenizer_json is not None:
            Tokenizer.from_str(tokenizer.tokenizer_json)
        else:
            assert tokenizer.directory is not None
            assert tokenizer.directory.is_dir()

    def test_knows_every_tensor_before_it_reads(self, reader: WeightReader, saved: SavedCheckpoint) -> None:
        """Names, shapes, and a positive number of bytes, each once."""
        infos = reader.infos()
        assert sorted(info.name for info in infos) == sorted(saved.tensors)
        assert {info.name: info.shape for info in infos} == {
            name: tuple(tensor.shape) for name, tensor in saved.tensors.items()
        }
        assert all(info.num_bytes > 0 for info in infos)
        _require_known(saved)

    def test_counts_stored_bytes(self, reader: WeightReader) -> None:
        """Memory is planned by them: numbers take what their dtype takes, and packed ones less than in float32."""
        for info in reader.infos():
            count = torch.Size(info.shape).numel()
            if info.dtype in DTYPE_BYTES:
                assert info.num_bytes == count * DTYPE_BYTES[info.dtype], info
            else:
                assert info.num_bytes < 4 * count, info

    def test_reads_every_tensor(self, reader: WeightReader, saved: SavedCheckpoint) -> None:
        """On the CPU, in the dtype of its info, or in float32 where it is packed."""
        for info in reader.infos():
            tensor = reader.read(info.name)
            stored = info.dtype if info.dtype in DTYPE_BYTES else "float32"
            assert tensor.device.type == "cpu"
            assert str(tensor.dtype) == f"torch.{stored}", info
            self._check(saved, info.name, tensor)
        _require_known(saved)

    def test_reads_in_any_order(self, reader: WeightReader, saved: SavedCheckpoint) -> None:
        """And more than once: a family may look at one tensor before others."""
        names = list(saved.tensors)
        for name in [*reversed(names), *names]:
            self._check(saved, name, reader.read(name))

    def test_refuses_unknown_names(self, reader: WeightReader) -> None:
        """With a `ModelError` that names the tensor."""
        with pytest.raises(ModelError, match=r"no\.such\.tensor"):
            reader.read("no.such.tensor")

    def test_yields_all_in_order(self, reader: WeightReader, saved: SavedCheckpoint) -> None:
        """`tensors` reads each once; what it yielded before keeps its values."""
        read = list(reader.tensors())
        assert [name for name, _ in read] == [info.name for info in reader.infos()]
        for name, tensor in read:
            assert isinstance(tensor, torch.Tensor)
            self._check(saved, name, tensor)

    def test_released_tensors_keep_their_values(self, reader: WeightReader, saved: SavedCheckpoint) -> None:
        """Released memory may be read again, by views of a tensor and by a second reading."""
        held = {name: reader.read(name) for name in saved.tensors}
        for name in saved.tensors:
            reader.release(name)
            reader.release(name)
        for name, tensor in held.items():
            self._check(saved, name, tensor)
            self._check(saved, name, reader.read(name))

    def test_tensors_outlive_the_reader(self, format: WeightFormat, saved: SavedCheckpoint) -> None:
        """`close` may be called twice, and takes nothing back."""
        reader = format.open(saved.files)
        held = {name: reader.read(name) for name in saved.tensors}
        reader.close()
        reader.close()
        for name, tensor in held.items():
            self._check(saved, name, tensor)

    def test_readers_are_apart(self, format: WeightFormat, saved: SavedCheckpoint) -> None:
        """Target and drafter may read one checkpoint at the same time."""
        first, second = format.open(saved.files), format.open(saved.files)
        first.close()
        with closing(second):
            for name in saved.tensors:
                self._check(saved, name, second.read(name))

    def test_packed_tensors_encode_the_same(self, reader: WeightReader) -> None:
        """Blocks give the numbers that `read` gives, by rows too; their formats are known before."""
        packed = [info.name for info in reader.infos() if isinstance(reader.read_packed(info.name), PackedTensor)]
        if not packed:
            assert not reader.packed_formats()
            pytest.skip("the checkpoint has no packed tensors")
        for name in packed:
            tensor, expected = reader.read_packed(name), reader.read(name)
            assert isinstance(tensor, PackedTensor)
            assert tensor.format in reader.packed_formats()
            assert tensor.shape == tuple(expected.shape)
            assert torch.equal(tensor.dequantized(), expected)
            assert torch.equal(tensor[1:].dequantized(), expected[1:])
            half = tensor.shape[1] // tensor.block_size // 2 * tensor.block_size
            assert torch.equal(tensor[:, half:].dequantized(), expected[:, half:])

    def test_packs_only_what_the_caller_holds(self, reader: WeightReader, saved: SavedCheckpoint) -> None:
        """`tensors` packs the formats that it is given, and no others."""
        assert all(isinstance(tensor, torch.Tensor) for _, tensor in reader.tensors(frozenset({"another"})))
        for name, tensor in reader.tensors(reader.packed_formats()):
            self._check(saved, name, tensor if isinstance(tensor, torch.Tensor) else tensor.dequantized())

    def test_names_its_files(self, reader: WeightReader, saved: SavedCheckpoint) -> None:
        """They identify the weights: they exist, and belong to the checkpoint."""
        for path in reader.files():
            assert path.is_file()
            assert path == saved.path or saved.path in path.parents or path.parent == saved.path.parent

    @pytest.mark.parametrize("cut", CUTS)
    def test_refuses_what_is_cut_off(self, format: WeightFormat, saved: SavedCheckpoint, cut: str) -> None:
        """A download that broke off: `open` raises a `ModelError` that names the file."""
        copies = _copied(saved)
        names = self._file_names(format, saved)
        if not names:
            pytest.skip(f"{self.plugin.__name__} does not say which files it reads")
        for name in names:
            path = _root(copies) / name
            whole = path.read_bytes()
            path.write_bytes(whole[: min(len(whole) - 1, int(len(whole) * CUTS[cut]) + (0.0 < CUTS[cut] < 1e-6))])
            with pytest.raises(ModelError) as caught:
                format.open(copies.files).close()
            assert path.name in str(caught.value), f"the message does not name the file: {caught.value}"
            path.write_bytes(whole)

    def test_refuses_missing_files(self, format: WeightFormat, saved: SavedCheckpoint) -> None:
        """A file that was not copied: a `ModelError` that names it."""
        copies = _copied(saved)
        names = self._file_names(format, saved)
        for name in names:
            path = _root(copies) / name
            whole = path.read_bytes()
            path.unlink()
            with pytest.raises(ModelError) as caught:
                format.open(copies.files).close()
            assert len(names) > 1 or path.name in str(caught.value) or str(path.parent) in str(caught.value)
            assert len(names) == 1 or path.name in str(caught.value), f"the message names no file: {caught.value}"
            path.write_bytes(whole)

    def test_leaves_the_files_alone(self, format: WeightFormat, saved: SavedCheckpoint) -> None:
        """Many processes read one checkpoint."""
        with leaves_files_alone(saved.path):
            format.config(saved.files)
            with closing(format.open(saved.files)) as reader:
                for name, _ in reader.tensors(reader.packed_formats()):
                    reader.read(name)

    def _create(self) -> WeightFormat:
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)))

    def _file_names(self, format: WeightFormat, saved: SavedCheckpoint) -> list[Path]:
        """The files that tensors are read from, relative to the checkpoint."""
        with closing(format.open(saved.files)) as reader:
            return [path.relative_to(_root(saved)) for path in reader.files()]

    def _check(self, saved: SavedCheckpoint, name: str, tensor: torch.Tensor) -> None:
        expected = saved.tensors[name]
        assert tensor.shape == expected.shape, name
        if tolerance := saved.tolerance.get(name, 0.0):
            torch.testing.assert_close(tensor.float(), expected.float(), rtol=0, atol=tolerance)
        else:
            assert torch.equal(tensor, expected), f"{name} came back with other values"


def _read(format: WeightFormat, path: Path) -> SavedCheckpoint:
    """A checkpoint of which nothing is known but what the format reads."""
    files = ModelFiles(reference=str(path), path=path)
    with closing(format.open(files)) as reader:
        tensors = {info.name: reader.read(info.name).clone() for info in reader.infos()}
    return SavedCheckpoint(path, copy.deepcopy(dict(format.config(files))), tensors, is_known=False)


def _require_known(saved: SavedCheckpoint) -> None:
    """Skips a test at its end, where its comparisons were of the format with itself."""
    if not saved.is_known:
        pytest.skip(
            "what the checkpoint holds is not known: expected = ... (--set expected=FOLDER) names it as safetensors"
        )


def _root(saved: SavedCheckpoint) -> Path:
    return saved.path if saved.path.is_dir() else saved.path.parent


def _copied(saved: SavedCheckpoint) -> SavedCheckpoint:
    """A checkpoint whose files the test may cut."""
    root = _root(saved)
    target = root.with_name(f"{root.name}-copy")
    shutil.copytree(root, target)
    return replace(saved, path=target if saved.path.is_dir() else target / saved.path.name)
