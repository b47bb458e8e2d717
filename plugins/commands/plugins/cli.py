"""The subcommands of `dovetail plugins`."""

from __future__ import annotations

import typer

from dovetail.plugins.commands.plugins.doctor import examine_plugins
from dovetail.plugins.commands.plugins.info import show_plugin
from dovetail.plugins.commands.plugins.listing import list_plugins
from dovetail.plugins.commands.plugins.new.command import new_plugin
from dovetail.plugins.commands.plugins.suite import run_suite

app = typer.Typer(no_args_is_help=True, help="List, describe, examine, test and write plugins.")
app.command("list")(list_plugins)
app.command("info")(show_plugin)
app.command("doctor")(examine_plugins)
app.command("test")(run_suite)
app.command("new")(new_plugin)
