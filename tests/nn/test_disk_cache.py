"""Nothing is read from a cache that other users can write to; each refusal says what to do."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dovetail.contracts.plugin import FixableReason
from dovetail.nn.native import loader as native
from dovetail.nn.native.content_hash import ContentHashes
from dovetail.nn.native.disk_cache import UnsafeCacheError, check_file, check_folder, make_private_folder
from dovetail.nn.packed_cache import PackedCache

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes say nothing there")
is_root = pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="gives files to another user")
needs_compiler = pytest.mark.skipif(not native.find_compilers(), reason="no C compiler")
NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [mode(tmp_path / "a"), mode(tmp_path / "a" / "b")] == [0o700, 0o700]


def test_a_folder_that_others_could_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    make_private_folder(tmp_path / "a")
    assert mode(tmp_path / "a") == 0o700


@pytest.mark.parametrize("open_mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_can_write_to_is_refused_with_what_to_do(tmp_path: Path, open_mode: int) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    folder.chmod(open_mode)
    for use in (check_folder, make_private_folder):
        with pytest.raises(UnsafeCacheError, match=re.escape(f"rm -r {folder}")):
            use(folder)
    assert mode(folder) == open_mode


@is_root
def test_a_folder_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(UnsafeCacheError, match="belongs to nobody, not to root"):
        check_folder(folder)


def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "shared" / "a")
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(UnsafeCacheError, match=f"chmod go-w {tmp_path / 'shared'}"):
        check_folder(tmp_path / "shared" / "a")
    # As in /tmp, where nobody can rename what is another's.
    (tmp_path / "shared").chmod(0o1777)
    check_folder(tmp_path / "shared" / "a")


def test_a_link_is_as_safe_as_the_place_that_it_stands_in(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "own")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "link").symlink_to(tmp_path / "own")
    check_folder(tmp_path / "shared" / "link")
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(UnsafeCacheError):
        check_folder(tmp_path / "shared" / "link")


def test_a_file_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.touch(0o600)
    check_file(file)
    file.chmod(0o666)
    with pytest.raises(UnsafeCacheError, match="mode 666"):
        check_file(file)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native, "cache_directory", lambda: tmp_path / "cache")
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "answer.c"
    path.write_text("int answer(void) { return 42; }")
    return path


@needs_compiler
def test_kernels_of_an_open_folder_are_not_loaded(source: Path, tmp_path: Path) -> None:
    native.built(source)
    (tmp_path / "cache" / "native").chmod(0o777)
    with pytest.raises(native.NativeError, match="mode 777"):
        native.load(source)
    [reason] = native.reasons_against(source)
    assert isinstance(reason, FixableReason)


@needs_compiler
@pytest.mark.parametrize("others", ["mode", pytest.param("owner", marks=is_root)])
def test_a_library_that_another_could_have_written_is_compiled_anew(
    source: Path, others: str, caplog: pytest.LogCaptureFixture
) -> None:
    library = native.built(source)
    if others == "mode":
        library.chmod(0o666)
    else:
        os.chown(library, NOBODY, NOBODY)
    planted = library.stat().st_ino
    again = native.built(source)
    status = again.stat()
    assert (status.st_ino, status.st_uid, mode(again)) != (planted, NOBODY, 0o666)
    assert (status.st_uid, mode(again)) == (os.geteuid(), 0o600)
    assert "compiled anew" in caplog.text


@pytest.mark.parametrize("what", ["folder", "file"])
def test_packed_weights_that_another_could_have_written_are_packed_anew(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PackedCache(tmp_path / "weights", 2**20)
    assert cache.put("k", {"w": torch.ones(64)})
    [file] = cache.directory.glob("*.safetensors")
    assert (mode(cache.directory), mode(file)) == (0o700, 0o600)
    assert cache.get("k") is not None
    (file if what == "file" else cache.directory).chmod(0o777)
    assert cache.get("k") is None
    assert "mode 777" in caplog.text
    assert file.exists() == (what == "folder")
    assert cache.put("k", {"w": torch.ones(64)}) == (what == "file")


def test_no_key_is_made_with_hashes_that_another_could_have_written(tmp_path: Path) -> None:
    checkpoint, folder = tmp_path / "model", tmp_path / "weights"
    checkpoint.write_text("weights")
    os.utime(checkpoint, (1, 1))
    make_private_folder(folder)
    folder.chmod(0o777)
    with pytest.raises(UnsafeCacheError):
        PackedCache(folder, 2**20).content_key([checkpoint])


def test_hashes_that_another_could_have_written_are_computed_anew(tmp_path: Path) -> None:
    file, memo = tmp_path / "model", tmp_path / "weights" / "hashes.json"
    file.write_text("weights")
    true = ContentHashes(memo).of([file])
    make_private_folder(memo.parent)
    status = file.stat()
    marks = f"{status.st_ino}, {status.st_size}, {status.st_mtime_ns}, {status.st_ctime_ns}"
    memo.write_text(f'{{"{file.resolve()}": [{marks}, "{"0" * 64}"]}}')
    memo.chmod(0o600)
    assert ContentHashes(memo).of([file]) == ["0" * 64]
    memo.chmod(0o666)
    assert ContentHashes(memo).of([file]) == true


@needs_compiler
def test_a_start_says_why_the_kernels_are_not_used(tmp_path: Path) -> None:
    cache = tmp_path / "dovetail" / "native"
    make_private_folder(cache)
    cache.chmod(0o777)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    program = (
        "from dovetail.nn import native; from dovetail.plugins.operators.native.operators import SOURCE; "
        "print(native.reasons_against(SOURCE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert f"rm -r {cache}" in done.stdout
