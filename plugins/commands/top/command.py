"""`dovetail top`: the load, the rates, the latencies and the workers of a server, live, from its metrics."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from typing import Annotated, ClassVar

import httpx
import typer
from rich.console import Group
from rich.live import Live

from dovetail.commands import create_console
from dovetail.commands.http import without_password
from dovetail.contracts.command import Command
from dovetail.contracts.errors import DovetailError
from dovetail.plugins.commands.top.figures import figures_between, load_of
from dovetail.plugins.commands.top.keyboard import Keyboard
from dovetail.plugins.commands.top.ranks import ranks_between
from dovetail.plugins.commands.top.scrape import NOTHING, Snapshot, metrics_url, read
from dovetail.plugins.commands.top.screen import data_of, rank_table, table_of

app = typer.Typer(help="Show a server's load, rates, latencies and workers, live.", rich_markup_mode=None)
_EXAMPLE = "Example: dovetail top localhost:8000 --once --json"


class TopCommand(Command):
    """Show a server's load, rates, latencies and workers, live."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


@app.command("top", epilog=_EXAMPLE)
def top(
    url: Annotated[str, typer.Argument(help="Server, Dovetail's or vLLM's; its /metrics is read.")] = "localhost:8000",
    interval: Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, print one table, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object per line.")] = False,
) -> None:
    """Show a server's load, rates, latencies and workers, live; q ends it.

    The numbers are those of the server's metrics. Percentiles are read off histograms: they lie between the bounds of a
    bucket.
    """
    with httpx.Client(timeout=max(5.0, interval)) as client, suppress(KeyboardInterrupt), Keyboard() as keyboard:
        view = _View(client, metrics_url(url))
        if once:
            keyboard.wait(interval)
            view.update()
            _print(view, as_json)
        elif as_json or not create_console().is_terminal:
            while not keyboard.wait(interval):
                view.update()
                _print(view, as_json)
        else:
            _show(view, keyboard, interval)


def _print(view: _View, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(view.data()))
    else:
        create_console().print(view.table())


def _show(view: _View, keyboard: Keyboard, interval: float) -> None:
    """Until q. A server that goes away may come back: the last numbers stay, with what is wrong below them."""
    with Live(view.table(), console=create_console(), screen=True, auto_refresh=False) as live:
        while not keyboard.wait(interval):
            try:
                view.update()
                trouble = None
            except DovetailError as error:
                trouble = str(error)
            live.update(view.table(trouble), refresh=True)


class _View:
    """The last two readings of a server. Raises `DovetailError` where it cannot be read."""

    def __init__(self, client: httpx.Client, url: str):
        self._client = client
        self._url = url
        self._shown_url = without_password(url)
        self._before = self._now = read(client, url)

    def update(self) -> None:
        """Reads again."""
        now: Snapshot = read(self._client, self._url)
        self._before, self._now = self._now, now

    def table(self, trouble: str | None = None) -> Group:
        """For people: the server's figures, and a row for each worker."""
        before, now = self._before, self._now
        load = load_of(now)
        figures = table_of(self._shown_url, load, figures_between(before, now), figures_between(NOTHING, now), trouble)
        ranks = ranks_between(before, now)
        return Group(figures, rank_table(ranks, of_replicas=bool(load.engines))) if ranks else Group(figures)

    def data(self) -> dict[str, object]:
        """For programs."""
        before, now = self._before, self._now
        data = data_of(self._shown_url, load_of(now), figures_between(before, now), figures_between(NOTHING, now))
        return data | {"ranks": [dataclasses.asdict(row) | {"state": row.state} for row in ranks_between(before, now)]}
