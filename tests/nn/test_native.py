"""Compiled kernels on disk: damaged ones are made anew, and what cannot be had is told with a reason."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dovetail.attention_backends.paged_cpu.native_calls import SOURCE as ATTENTION
from dovetail.contracts.plugin import FixableReason
from dovetail.nn.native import compiler_patience
from dovetail.nn.native import loader as native
from dovetail.nn.native.compiler_patience import HungError, Patience
from dovetail.plugins.commands.doctor.bandwidth import SOURCE as READ_MEMORY
from dovetail.plugins.operators.native.low_rank import SOURCE as LOW_RANK
from dovetail.plugins.operators.native.operators import SOURCE as OPERATORS
from dovetail.plugins.quantization.grouped.kernel import SOURCE as LINEAR
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not native.find_compilers(), reason="no C compiler")

ADD = """
typedef struct { int a, b; } Call;
int add(const Call *c) { return c->a + c->b; }
int self_test(void) { return 0; }
"""


class Add(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int32), ("b", ctypes.c_int32))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "native"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "add.c"
    path.write_text(ADD)
    return path


def five(source: Path) -> int:
    return native.Kernel(native.load(source), "add", Add)(2, 3)


def test_a_library_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.built(source)
    monkeypatch.setattr(native, "_build", lambda *arguments: pytest.fail("compiled again"))
    assert native.built(source) == first
    assert five(source) == 5


def test_compiling_is_announced_once_and_only_where_it_is_done(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    native._warn_once.cache_clear()
    native.built(source)
    source.write_text(ADD + "int other;")
    native.built(source)
    [message] = caplog.messages
    assert message.startswith("compiling kernels")
    caplog.clear()
    native._warn_once.cache_clear()
    native.built(source)
    assert caplog.messages == []
    native.announce_compiling()


@pytest.mark.parametrize("damage", ["emptied", "cut", "holed"])
def test_a_damaged_library_is_compiled_anew(source: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    library = native.built(source)
    whole = library.read_bytes()
    library.write_bytes(
        {"emptied": b"", "cut": whole[: len(whole) // 2], "holed": whole[:4096] + bytes(len(whole) - 4096)}[damage]
    )
    assert five(source) == 5
    assert "damaged" in caplog.text


def test_a_whole_library_that_does_not_load_is_compiled_anew(source: Path) -> None:
    library = native.built(source)
    library.write_bytes(b"of another system")
    name = library.stem.rpartition("-")[0]
    library.replace(library.with_name(f"{name}-{native._file_hash(library)}.so"))
    assert five(source) == 5


def test_a_library_that_lacks_a_function_is_compiled_anew(source: Path) -> None:
    library = native.built(source)
    source.write_text("int self_test(void) { return 0; }")
    other = native.built(source)
    other.replace(library.with_name(f"{library.stem.rpartition('-')[0]}-{native._file_hash(other)}.so"))
    library.unlink()
    source.write_text(ADD)
    assert five(source) == 5


def test_a_function_that_the_source_lacks_is_an_error_that_names_both(source: Path) -> None:
    with pytest.raises(native.NativeError, match=r"add\.c has no function subtract"):
        native.load(source).subtract()


def test_kernels_that_never_load_are_a_reason_against(source: Path) -> None:
    source.write_text("int nowhere(void);\nint add(void) { return nowhere(); }")
    [reason] = native.reasons_against(source)
    assert "nowhere" in reason
    with pytest.raises(native.NativeError, match="cannot be loaded"):
        native.load(source)


@pytest.mark.parametrize(("body", "found"), [("return 3;", "returns 3"), ("__builtin_trap();", "dies of signal")])
def test_kernels_that_fail_their_self_test_are_nothing_that_the_user_can_mend(
    source: Path, body: str, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text(f"int self_test(void) {{ {body} }}")
    [reason] = native.reasons_against(source)
    assert native.reasons_against(source) == [reason]
    [warning] = caplog.messages
    assert found in warning
    assert not isinstance(reason, FixableReason)
    assert "add.c" in reason
    assert found in reason
    assert "auto takes the next candidate" in reason
    with pytest.raises(native.SelfTestError):
        native.built(source)


def test_what_another_compiler_makes_may_pass_the_self_test(source: Path, fake: Callable[[str, str], None]) -> None:
    real = native.find_compilers()[0]
    source.write_text(ADD.replace("return 0;", "return WRONG;"))
    fake("cc", f'exec {real} -DWRONG=1 "$@"')
    fake("gcc", f'exec {real} -DWRONG=0 "$@"')
    assert five(source) == 5


def test_libraries_that_the_system_does_not_load_are_not_the_kernels_fault(source: Path) -> None:
    source.write_text("int nowhere(void);\nint self_test(void) { return nowhere(); }\nint (*now)(void) = nowhere;")
    [reason] = native.reasons_against(source)
    assert isinstance(reason, FixableReason)
    assert "cannot be loaded" in reason


def test_a_change_of_a_shared_header_compiles_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "INCLUDE", tmp_path / "include")
    header = tmp_path / "include" / "dovetail" / "numbers.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define FOUND 0")
    source.write_text("#include <dovetail/numbers.h>\nint found(void) { return FOUND; }")
    first = native.built(source)
    header.write_text("#define FOUND 1")
    second = native.built(source)
    assert [ctypes.CDLL(str(library)).found() for library in (first, second)] == [0, 1]


def test_a_folder_that_cannot_be_written_is_a_reason_that_says_what_to_set(source: Path, folder: Path) -> None:
    folder.parent.write_text("a file stands in the way")
    [reason] = native.reasons_against(source)
    assert "XDG_CACHE_HOME" in reason
    assert str(folder) in reason


def test_libraries_that_nobody_used_for_long_are_deleted(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    old, recent, dead = folder / "add-1-1.so", folder / "add-2-2.so", folder / ".build-dead"
    old.touch()
    recent.touch()
    dead.mkdir()
    for path in (old, dead):
        os.utime(path, (1, 1))
    made = native.built(source)
    assert set(folder.iterdir()) == {recent, made}
    os.utime(made, (1, 1))
    native.built(source)
    assert made.stat().st_mtime > 1


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script of that name before everything on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


BROKEN = 'echo "cc1: not found" >&2; exit 1'


def test_compilers_are_tried_in_turn(source: Path, fake: Callable[[str, str], None]) -> None:
    real = native.find_compilers()[0]
    fake("cc", BROKEN)
    fake("gcc", f'exec {real} "$@"')
    assert five(source) == 5


def test_what_every_compiler_said_is_told(source: Path, fake: Callable[[str, str], None]) -> None:
    for name in ("cc", "gcc", "clang"):
        fake(name, f"echo {name} is broken >&2; exit 1")
    [reason] = native.reasons_against(source)
    assert all(f"{name} is broken" in reason for name in ("cc", "gcc", "clang"))


def is_running(pid: str) -> bool:
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which each command first writes its process id; its time limit begins then, however late it is
    scheduled."""
    path = tmp_path / "begun"
    path.touch()

    class Popen(subprocess.Popen[str]):
        def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            while self.poll() is None and str(self.pid) not in path.read_text().split():
                time.sleep(0.001)
            return super().communicate(input, timeout)

    monkeypatch.setattr(compiler_patience, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Popen}))
    return path


def test_a_compiler_that_hangs_is_waited_for_once(
    source: Path, begun: Path, fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_patience", Patience(0.6))
    for name in ("cc", "gcc", "clang"):
        fake(name, f"sleep 1000 & echo $$ {name} $! >> {begun}; wait")
    other = source.with_name("other.c")
    other.write_text(ADD)
    reasons = {*native.reasons_against(source), *native.reasons_against(other)}
    started = begun.read_text().split()
    assert started[1::3] == ["cc", "gcc", "clang"]
    # The same for both, so that a start tells it once.
    [reason] = reasons
    assert isinstance(reason, FixableReason)
    wait_until(lambda: not any(map(is_running, started[2::3])), "what the compilers started has ended")
    # As another process finds it: nothing is started.
    monkeypatch.setattr(native, "_patience", Patience())
    assert set(native.reasons_against(source)) == reasons
    assert begun.read_text().split() == started
    # Each way back that the message names.
    for note in re.findall(r"delete (\S+)\)", reason):
        Path(note).unlink()
    for name in ("cc", "gcc", "clang"):
        (begun.with_name("bin") / name).unlink()
    monkeypatch.setattr(compiler_patience, "subprocess", subprocess)
    assert five(source) == 5


def test_a_hung_compiler_is_tried_again_when_it_changes(
    source: Path, fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = native.find_compilers()[0]
    monkeypatch.setattr(native, "_patience", Patience(0.6))
    for name in ("cc", "gcc", "clang"):
        fake(name, "sleep 60")
    with pytest.raises(native.NativeError, match="did not end"):
        native.built(source)
    monkeypatch.setattr(native, "_patience", Patience())
    fake("cc", f'exec {real} "$@"')
    assert five(source) == 5


def test_a_self_test_that_hangs_is_waited_for_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.find_compilers()[:1]
    monkeypatch.setattr(native, "find_compilers", lambda: first)
    self_test = native._self_test

    def impatiently(source: Path, library: Path) -> None:
        monkeypatch.setattr(native, "_patience", Patience(0.2))
        self_test(source, library)

    monkeypatch.setattr(native, "_self_test", impatiently)
    source.write_text(ADD.replace("return 0;", "for (;;);"))
    [reason] = native.reasons_against(source)
    assert "the self-test of add.c did not end" in reason
    monkeypatch.setattr(native, "_patience", Patience())
    monkeypatch.setattr(native, "_self_test", lambda *arguments: pytest.fail("run again"))
    assert native.reasons_against(source) == [reason]


def test_commands_that_hang_wait_less_than_one_bound_together() -> None:
    patience, waited = Patience(0.4), []
    for _ in range(5):
        with pytest.raises(HungError):
            patience.run(["sleep", "60"])
        waited.append(patience.left)
    assert waited == sorted(waited, reverse=True)
    assert min(waited) > 0


@pytest.mark.parametrize("left", ["none", "broken"])
def test_a_library_outlives_its_compiler(
    source: Path, left: str, fake: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native.built(source)
    if left == "none":
        monkeypatch.setenv("PATH", "")
    else:
        for name in ("cc", "gcc", "clang"):
            fake(name, BROKEN)
    assert native.built(source) == library


def test_a_library_for_another_processor_does_not_serve(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.built(source)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(native, "_processor", lambda: ("another",))
    [reason] = native.reasons_against(source)
    assert "install gcc or clang" in reason


@pytest.fixture
def compiler_without_openmp(fake: Callable[[str, str], None]) -> None:
    """As Apple's clang answers, under all names."""
    real = native.find_compilers()[0]
    for name in ("cc", "gcc", "clang"):
        fake(
            name,
            'case "$*" in *-fopenmp*) echo "clang: error: unsupported option \'-fopenmp\'" >&2; exit 1;; esac\n'
            f'exec {real} "$@"',
        )


@pytest.mark.usefixtures("compiler_without_openmp")
@pytest.mark.parametrize("shipped", [ATTENTION, LINEAR, LOW_RANK, OPERATORS, READ_MEMORY], ids=lambda path: path.stem)
def test_bundled_kernels_compile_without_openmp(
    shipped: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:]))  # much sooner done
    library = native.built(shipped)
    assert "one thread" in caplog.text
    # All symbols resolved at once, in a process in which nobody brought OpenMP.
    program = f"import ctypes, os; ctypes.CDLL({str(library)!r}, mode=os.RTLD_NOW)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.usefixtures("compiler_without_openmp")
def test_kernels_that_need_openmp_say_so(source: Path) -> None:
    source.write_text("#ifndef _OPENMP\n#error not without\n#endif\n")
    [reason] = native.reasons_against(source)
    assert "libomp" in reason


def test_a_mistake_in_the_source_is_told_with_the_compilers_message(source: Path) -> None:
    source.write_text("int add(void) { return missing; }")
    [reason] = native.reasons_against(source)
    assert "missing" in reason
    assert "OpenMP" not in reason


def test_one_compiler_under_two_names_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    (tmp_path / "cc").symlink_to("gcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.find_compilers() == [str(tmp_path / "cc")]


class Inner(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p),)


class First(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("count", ctypes.c_int64))


class Second(First):
    _fields_ = (("y", ctypes.c_void_p), ("scale", ctypes.c_float))


def test_addresses_are_found_in_inherited_fields_too() -> None:
    assert native.address_fields(Second) == ("x", "y")


@pytest.mark.parametrize("kind", [ctypes.POINTER(ctypes.c_float), ctypes.c_char_p, Inner, ctypes.c_void_p * 2])
def test_arguments_with_addresses_of_other_types_are_refused(source: Path, kind: type) -> None:
    structure = type("Call", (ctypes.Structure,), {"_fields_": (("a", ctypes.c_int32), ("data", kind))})
    with pytest.raises(TypeError, match=r"Call\.data .* must be c_void_p"):
        native.Kernel(native.load(source), "add", structure)
