"""`dovetail lock`: what a run is made of, written to a file, and compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from dovetail.commands import LayeredConfig, ResolvedConfig, create_console, explain, print_warning, takes_config
from dovetail.commands.locks import (
    Difference,
    Lock,
    check_target,
    compare_locks,
    compare_with_machine,
    not_as_installed,
    read_lock,
    take_lock,
    uncompared_parts,
    write_lock,
)
from dovetail.contracts.command import Command
from dovetail.contracts.errors import ConfigError

_VALUE = "config "
"""What the subject of a value that differs begins with."""

app = typer.Typer(help="Write what a run is made of to a file, and compare.", rich_markup_mode=None)


class LockCommand(Command):
    """Write what a run is made of to a file, and prove a machine or another lock equal."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


@app.command("lock")
@takes_config
def lock_run(
    layered: LayeredConfig,
    out: Annotated[Path, typer.Option("--out", help="The file to write; a lock is overwritten.")] = Path(
        "dovetail.lock"
    ),
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            metavar="LOCK",
            help="Compare this machine with a lock instead: with CONFIG its parts and models too, without it the "
            "distributions, and the code of local parts.",
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option("--diff", metavar="LOCK LOCK", help="Compare two locks instead.")
    ] = None,
    whole_weights: Annotated[
        bool, typer.Option("--weights", help="Hash large weight files as well, which reads them.")
    ] = False,
    with_values: Annotated[
        bool, typer.Option("--values", help="Values of the config that differ make the answer `not equal` as well.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print differences as JSON.")] = False,
) -> None:
    """Write what a run is made of: every part with its distribution, version, contract and files, and the model.

    Exit code 0: written, or equal; 1: a difference, or something that cannot be used; 2: the arguments or the config
    cannot be used. Versions of libraries and the platform are shown where they differ, and make no difference.
    """
    if check is not None and diff is not None:
        raise ConfigError("--check and --diff are two questions: ask one")
    if diff is not None:
        first, second = diff
        names = (str(first), str(second))
        found = compare_locks(read_lock(first), read_lock(second), names)
        _print_answer(_judged(found, with_values=with_values), as_json=as_json)
        return
    # What a lock says of this run is not asked while one is written.
    unlocked = replace(layered, config=layered.config.model_copy(update={"lock": None}))
    if check is not None:
        lock = read_lock(check)
        resolved = _resolve(unlocked) if layered.origins else None
        if resolved is None and with_values:
            raise ConfigError("--values compares the values of a config: name the config")
        found = [*compare_with_machine(lock, resolved), *_values(lock, resolved)]
        limits = _limits(lock) if resolved is None else ""
        _print_answer(_judged(found, with_values=with_values), as_json=as_json, limits=limits)
        return
    if with_values:
        raise ConfigError("--values belongs to a comparison: add --check or --diff")
    check_target(out)
    lock = take_lock(_resolve(unlocked), whole_weights=whole_weights)
    for warning in not_as_installed(lock):
        print_warning(warning)
    write_lock(lock, out)
    typer.echo(f"{out}: {len(lock.parts)} parts of {len(lock.distributions)} distributions, {len(lock.models)} models")


def _resolve(layered: LayeredConfig) -> ResolvedConfig:
    explanation = explain(layered)
    if explanation.refusal is not None:
        raise explanation.refusal
    assert explanation.resolved is not None
    return explanation.resolved


def _limits(lock: Lock) -> str:
    """How far an answer goes that was found without a config."""
    counts = [(len(uncompared_parts(lock)), "part"), (len(lock.models), "model")]
    left = " and ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts if count)
    return f"as far as distributions and hooks go; {left} not compared: name the config"


def _values(lock: Lock, resolved: ResolvedConfig | None) -> Sequence[Difference]:
    """The values in which the lock's config and another one differ."""
    if resolved is None:
        return ()
    return compare_locks(lock, replace(lock, values=dict(resolved.values)), ("the lock", "this config"))


def _judged(differences: Sequence[Difference], *, with_values: bool) -> list[Difference]:
    """The differences, of which values of the config count where that is asked for."""
    return [replace(one, is_informative=False) if with_values and _is_value(one) else one for one in differences]


def _is_value(one: Difference) -> bool:
    return one.subject.startswith(_VALUE)


def _answer(differences: Sequence[Difference], limits: str) -> str:
    """The last line, where all that matters is equal."""
    values = [one.subject.removeprefix(_VALUE) for one in differences if _is_value(one)]
    if values:
        differ = f"{len(values)} config value{'s differ' if len(values) > 1 else ' differs'}"
        return f"equal in parts, distributions and models; {differ}: {', '.join(values)}"
    return f"equal, {limits}" if limits else "equal"


def _print_answer(differences: Sequence[Difference], *, as_json: bool, limits: str = "") -> None:
    """Prints what differs, and how far the answer goes where it has limits. Exits with 1 where it matters."""
    matters = any(not one.is_informative for one in differences)
    if as_json:
        data = {"equal": not matters, "differences": [asdict(one) for one in differences]}
        data |= {"limits": limits} if limits else {}
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        console = create_console()
        for one in differences:
            console.print(f"{'(informative) ' if one.is_informative else ''}{one}", markup=False, soft_wrap=True)
        answer = "not equal" if matters else _answer(differences, limits)
        console.print(answer, markup=False, highlight=False, soft_wrap=True)
    if matters:
        raise typer.Exit(1)
