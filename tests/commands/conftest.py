"""A tiny chat model, and a terminal to use it in."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from dovetail.testing.tiny_models import save_tiny_model, tiny_config

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}.{% endfor %}"
_PLAIN = [
    "-o",
    "attention=sdpa",
    "-o",
    "model.operators=null",
    "-o",
    "executor.threads=1",
    "-o",
    "cache.memory_gib=0.1",
]
"""Nothing that would be compiled: tests of the cache folder give each process an empty one."""
_DEADLINE = 120.0


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over printable ASCII, one token a character, with a chat template and a long context: so deep that
    its longest answer takes longer than anybody needs to press Ctrl-C."""
    directory = tmp_path_factory.mktemp("tiny-chat")
    save_tiny_model(directory, tiny_config("llama", max_position_embeddings=16384, num_hidden_layers=24))
    tokenizer = Tokenizer(BPE({char: index for index, char in enumerate(string.printable)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


class Terminal:
    """`dovetail ARGS` in a pseudo terminal of 80 columns."""

    def __init__(self, arguments: list[str], environment: dict[str, str]):
        self._fd, child = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dovetail", *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80"} | environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(child)
        self.shown = ""

    def type(self, keys: str) -> None:
        """As somebody at the keyboard."""
        os.write(self._fd, keys.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads until `pattern` is shown; what came up to its end counts no more for the next call."""
        deadline = time.monotonic() + _DEADLINE
        while (found := re.search(pattern, self.shown)) is None:
            readable, _, _ = select.select([self._fd], [], [], deadline - time.monotonic())
            assert readable, f"{pattern!r} was not shown, but: {self.shown!r}"
            try:
                self.shown += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:  # the process has ended
                pytest.fail(f"{pattern!r} was not shown, but: {self.shown!r}")
        self.shown = self.shown[found.end() :]
        return found

    def end(self) -> int:
        """Waits for the process to exit; its exit code."""
        try:
            while self._process.poll() is None:
                if select.select([self._fd], [], [], 0.05)[0]:
                    os.read(self._fd, 65536)
        except OSError:  # the other side of the terminal is closed
            pass
        return self._process.wait(_DEADLINE)

    def close(self) -> None:
        """Ends what is left."""
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


def _take_terminal() -> None:
    import fcntl
    import termios

    # So that Ctrl-C in the terminal reaches the process. What a shell starts in the background ignores the signal, and
    # so would its children.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def plain_terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts `dovetail ARGS`."""
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(list(arguments), {}))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def terminal(chat_model: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts `dovetail COMMAND ARGS` over the tiny chat model; the cache folder is the test's own."""
    opened: list[Terminal] = []

    def start(command: str, *arguments: str) -> Terminal:
        given = [command, *arguments, "--model", str(chat_model), *_PLAIN]
        opened.append(Terminal(given, {"XDG_CACHE_HOME": str(tmp_path / "cache")}))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
