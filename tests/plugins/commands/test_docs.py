"""`dovetail docs` over a small site: the real one is built with the wheel, whose smoke test reads it."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx
import pytest

from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.docs import command
from dovetail.plugins.commands.docs.command import DocsCommand, create_server, page_file
from dovetail.testing.command_suite import CommandSuite

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("index.html", "contracts/index.html", "contracts/scheduler.html", "assets/site.css")
SERVE = """
import sys
from pathlib import Path
from dovetail.plugins.commands.docs import command
command.SITE = Path(sys.argv.pop(1))
command.app()
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    for page in PAGES:
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(f"this is {page}")
    (tmp_path / "secret").write_text("not of the site")
    return folder


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with create_server(site, 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class TestDocs(CommandSuite):
    plugin = DocsCommand
    works = (["--path"], ["contracts/scheduler", "--path"])
    refused = (["no-such-page", "--no-browser"], ["--port", "70000"])

    @pytest.fixture(autouse=True)
    def _site(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command, "SITE", site)


def test_pages_are_served(address: str) -> None:
    for page in PAGES:
        assert httpx.get(f"{address}/{page}", timeout=60).text == f"this is {page}"
    assert httpx.get(f"{address}/", timeout=60).text == "this is index.html"


@pytest.mark.parametrize("path", ["/../secret", "/%2e%2e/secret", "/contracts/../../secret", "/assets/", "/none.html"])
def test_nothing_else_is_served(address: str, path: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())  # as it stands: clients tidy paths up
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split(b" ")[1] == b"404"


def test_ctrl_c_ends_it(site: Path) -> None:
    arguments = [sys.executable, "-c", SERVE, str(site), "contracts/scheduler", "--no-browser"]
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        # As at a terminal: what a shell starts in the background ignores the signal, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as served:
        assert served.stdout is not None
        address = served.stdout.readline().split()[0]
        assert httpx.get(address, timeout=60).text == "this is contracts/scheduler.html"
        served.send_signal(signal.SIGINT)
        _, errors = served.communicate(timeout=60)
    assert served.returncode == 0
    assert errors == ""


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("index", "index.html"),
        ("contracts", "contracts/index.html"),
        ("contracts/scheduler", "contracts/scheduler.html"),
        ("contracts/scheduler.html", "contracts/scheduler.html"),
        ("/contracts/scheduler.md", "contracts/scheduler.html"),
    ],
)
def test_a_page_by_its_name(site: Path, page: str, file: str) -> None:
    assert page_file(site, page) == file


def test_an_unknown_page_names_the_nearest(site: Path) -> None:
    with pytest.raises(ConfigError, match=r"no page 'contracts/schedulr'. Did you mean contracts/scheduler"):
        page_file(site, "contracts/schedulr")


def test_a_checkout_without_a_built_site_says_what_to_run_and_where(tmp_path: Path) -> None:
    (tmp_path / "mkdocs.yml").write_text("site_name: Dovetail")
    with pytest.raises(DovetailError, match=f"run `make site` in {re.escape(str(tmp_path))}, then this again"):
        page_file(tmp_path / "plugins" / "commands" / "docs" / "built-site", "index")


def test_a_wheel_without_the_site_says_that_it_was_built_so(tmp_path: Path) -> None:
    site = tmp_path / "dovetail" / "plugins" / "commands" / "docs" / "built-site"
    with pytest.raises(DovetailError, match="built without its documentation: `make wheel` in a clone builds a wheel"):
        page_file(site, "index")


@pytest.mark.parametrize(
    ("command", "has_site", "warns"),
    [("bdist_wheel", False, True), ("bdist_wheel", True, False), ("editable_wheel", False, False)],
)
def test_building_a_wheel_without_the_site_warns(tmp_path: Path, command: str, has_site: bool, warns: bool) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    if has_site:
        page = tmp_path / "plugins" / "commands" / "docs" / "built-site" / "index.html"
        page.parent.mkdir(parents=True)
        page.touch()
    # setup.py as a build runs it; with --help setuptools ends before it builds.
    done = subprocess.run([sys.executable, "setup.py", command, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("this wheel will have no documentation" in done.stderr) == warns


def test_a_port_that_is_taken(site: Path) -> None:
    with create_server(site, 0) as first, pytest.raises(ConfigError, match="--port 0 takes any that is free"):
        create_server(site, first.server_address[1])
