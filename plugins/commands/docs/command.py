"""`dovetail docs`: the documentation site that a wheel holds, or a checkout, at an address of this machine."""

from __future__ import annotations

import difflib
import webbrowser
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from dovetail.contracts.command import Command
from dovetail.contracts.errors import ConfigError, DovetailError

SITE = Path(__file__).with_name("built-site")
"""Where `make site` builds it, and wheels of `make wheel` have it."""

app = typer.Typer(help="Show the documentation, offline.", rich_markup_mode=None)


class DocsCommand(Command):
    """Show the documentation, offline."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


class PageHandler(SimpleHTTPRequestHandler):
    """Files of one folder, without listings of folders and without a line per request."""

    def list_directory(self, path: object) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        return None


@app.command(epilog="Example: dovetail docs contracts/scheduler")
def show_docs(
    page: Annotated[str, typer.Argument(help="The page to begin with, such as contracts/scheduler.")] = "index",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    path: Annotated[bool, typer.Option("--path", help="Print where the page is, and serve nothing.")] = False,
) -> None:
    """Serve the documentation on 127.0.0.1 until Ctrl-C. It loads nothing from elsewhere."""
    file = page_file(SITE, page)
    if path:
        typer.echo(SITE / file)
        return
    server = create_server(SITE, port)
    address = f"http://127.0.0.1:{server.server_address[1]}/{file}"
    typer.echo(f"{address} (Ctrl-C ends it)")
    if browser:
        webbrowser.open(address)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()


def page_file(site: Path, page: str) -> str:
    """The file of a page, relative to `site`.

    Args:
        site: The folder with the built site.
        page: As in the address, with or without ".html".

    Raises:
        DovetailError: There is no built site.
        ConfigError: The site has no such page.
    """
    if not (site / "index.html").exists():
        raise DovetailError(_why_missing(site))
    name = page.strip("/").removesuffix(".html").removesuffix(".md")
    pages = sorted(file.relative_to(site).with_suffix("").as_posix() for file in site.rglob("*.html"))
    for known in (name, f"{name}/index"):
        if known in pages:
            return f"{known}.html"
    nearest = difflib.get_close_matches(name, pages, n=3)
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ConfigError(f"the documentation has no page '{page}'.{hint}")


def _why_missing(site: Path) -> str:
    """What to run for a site that is not there: a checkout can build it, what a wheel lacks a new wheel brings."""
    root = site.parents[3]
    if (root / "mkdocs.yml").is_file():
        return (
            f"the documentation is not built yet: run `make site` in {root}, then this again."
            f" Its pages are also readable as Markdown, in {root / 'docs'}"
        )
    return (
        "this Dovetail was built without its documentation: `make wheel` in a clone builds a wheel that includes it, a"
        " plain `pip wheel` does not. Its pages are also readable as Markdown, under docs/ of the repository"
    )


def create_server(site: Path, port: int) -> ThreadingHTTPServer:
    """A server of the folder `site` on 127.0.0.1; it listens already.

    Raises:
        ConfigError: The port cannot be had.
    """
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(PageHandler, directory=str(site)))
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used: {error.strerror}; --port 0 takes any that is free") from None
