"""An index of shards names files of its own directory, in words, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles
from dovetail.plugins.weight_formats.safetensors import SafetensorsFormat


def open_with(directory: Path, name: Any) -> Any:
    directory.mkdir()
    for place in (directory, directory.parent):
        save_file({"a": torch.ones(2)}, place / "x.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    return SafetensorsFormat(SafetensorsFormat.Options()).open(ModelFiles(str(directory), directory))


@pytest.mark.parametrize("name", [5, None, ["x.safetensors"], {}, "", "../x.safetensors", "a/../../x.safetensors"])
def test_what_is_no_file_of_the_directory(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ModelError, match=r"weight_map says that tensor 'a' is in .*, which names no file in"):
        open_with(tmp_path / "model", name)
    with pytest.raises(ModelError, match="names no file in"):
        open_with(tmp_path / "other", str(tmp_path / "x.safetensors"))


def test_a_file_of_the_directory(tmp_path: Path) -> None:
    assert open_with(tmp_path / "model", "x.safetensors").read("a").tolist() == [1, 1]
