"""Arguments with which commands take a configuration: CONFIG, `-o key=value`, `--speculative`, and flags of other
projects, such as vLLM's.

    @app.command()
    @takes_config
    def generate(layered: LayeredConfig, prompt: Annotated[str, typer.Argument()]) -> None: ...

The command's first parameter gets the loaded configuration; the others do not change.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dovetail.config.files import is_config_file
from dovetail.config.foreign_names import ForeignName, ValueType, foreign_names, project_of
from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError

_HELP = "Config file (YAML, TOML, JSON) or the manifest of a run; defaults where it is left out."
_TYPES: dict[ValueType, Any] = {
    "str": str | None,
    "int": int | None,
    "float": float | None,
    "json": str | None,
    "strs": list[str] | None,
    "switch": bool | None,
}


def takes_config(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` a CONFIG argument and options that override it; its first parameter gets a `LayeredConfig`."""
    return _wrap(command, Annotated[str | None, typer.Argument(metavar="CONFIG", help=_HELP)])


def takes_config_option(command: Callable[..., None]) -> Callable[..., None]:
    """Does what `takes_config` does, with the option `--config CONFIG`, for commands with other arguments."""
    return _wrap(command, Annotated[str | None, typer.Option("--config", "-c", metavar="CONFIG", help=_HELP)])


def takes_model_or_config(command: Callable[..., None]) -> Callable[..., None]:
    """Does what `takes_config` does; the argument may be a model in place of a config file."""
    help_text = "A model: a folder, a GGUF file, `org/name` or `scheme:reference`. Or a c" + _HELP[1:]
    argument = typer.Argument(metavar="MODEL|CONFIG", help=help_text)
    return _wrap(command, Annotated[str | None, argument], takes_model=True)


def _wrap(command: Callable[..., None], config: Any, *, takes_model: bool = False) -> Callable[..., None]:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    taken = {parameter.name for parameter in own}
    names = {name.name: name for name in foreign_names().values() if name.name not in taken}

    def wrapper(**given: Any) -> None:
        given.pop("help_all")
        flags = {name: given.pop(name) for name in names}
        flags = {name: value for name, value in flags.items() if value is not None}
        source = given.pop("config")
        if takes_model and source is not None and not is_config_file(Path(source)):
            if "model" in flags:
                raise ConfigError(f"two models are given, {source} and --model {flags['model']}: leave one out")
            source, flags = None, {**flags, "model": source}
        overrides = given.pop("overrides") or []
        if (lock := given.pop("lock")) is not None:
            overrides = [*overrides, f"lock={json.dumps(lock)}"]
        layered = load_config(
            source,
            overrides=overrides,
            flags=flags,
            speculative=given.pop("speculative"),
        )
        command(layered, **given)

    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("config", keyword_only, default=None, annotation=config),
        *(parameter.replace(kind=keyword_only) for parameter in own),
        inspect.Parameter("overrides", keyword_only, default=None, annotation=_override_type()),
        inspect.Parameter("speculative", keyword_only, default=None, annotation=_speculative_type()),
        inspect.Parameter("lock", keyword_only, default=None, annotation=_lock_type()),
        *_flags(names.values()),
        inspect.Parameter("help_all", keyword_only, default=False, annotation=_help_all_type()),
    ]
    # typer reads a command's parameters from its signature and its annotations.
    vars(wrapper)["__signature__"] = inspect.Signature(parameters)
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__name__ = command.__name__
    wrapper.__doc__ = command.__doc__
    return wrapper


def _override_type() -> Any:
    help_text = "Set one value, for example -o scheduler.name=priority. Repeat for more."
    return Annotated[list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help=help_text)]


def _speculative_type() -> Any:
    help_text = "Speculate: with a drafter of the config, a draft worker of `dovetail plugins list`, or off."
    return Annotated[str | None, typer.Option("--speculative", metavar="NAME", help=help_text)]


def _lock_type() -> Any:
    help_text = "Start only where parts and model are those of this lock file (`dovetail lock`)."
    return Annotated[str | None, typer.Option("--lock", metavar="FILE", help=help_text)]


def _help_all_type() -> Any:
    option = typer.Option(
        "--help-all",
        is_eager=True,
        callback=_print_whole_help,
        help="As --help, with flags of other projects (vLLM) that also work.",
    )
    return Annotated[bool, option]


def _print_whole_help(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    for parameter in context.command.params:
        name = foreign_names().get(parameter.name or "")
        if name is not None and name.status == "works":
            vars(parameter)["hidden"] = False
    typer.echo(context.get_help())
    raise typer.Exit


def _flags(names: Any) -> Iterator[inspect.Parameter]:
    for name in names:
        # Too many for --help; those that are not taken are known as well, so that they answer with the reason.
        option = typer.Option(*_declarations(name), help=_flag_help(name), hidden=True)
        project = project_of(name.name)
        option.rich_help_panel = None if project is None else f"{project.title}'s names"
        annotation = cast(Any, Annotated)[_TYPES[name.type], option]
        yield inspect.Parameter(name.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _declarations(name: ForeignName) -> list[str]:
    return [name.flag if name.negative_flag is None else f"{name.flag}/{name.negative_flag}"]


def _flag_help(name: ForeignName) -> str:
    return f"sets {name.key}" if name.status == "works" else f"{name.status}: {name.refusal}"
