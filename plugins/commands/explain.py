"""`dovetail explain`: what a configuration resolves to, and why."""

from __future__ import annotations

import json
from itertools import groupby, takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dovetail.commands import (
    Decision,
    Explanation,
    LayeredConfig,
    MemoryEstimate,
    StepMessages,
    Value,
    as_data,
    create_console,
    exit_code,
    explain,
    print_error,
    print_warning,
    takes_config,
    write_manifest,
)
from dovetail.contracts.command import Command
from dovetail.contracts.errors import ConfigError

app = typer.Typer(help="Show what a config resolves to, and why, without loading weights.", rich_markup_mode=None)

_KINDS = ("plan", "receive", "all_reduce", "all_gather", "broadcast", "send", "result")
"""Of messages, in the order of a step."""


class ExplainCommand(Command):
    """Show what a config resolves to, and why, without loading weights."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


@app.command("explain")
@takes_config
def explain_config(
    layered: LayeredConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", help="Write a file from which the run can be repeated.")
    ] = None,
) -> None:
    """Show what a config resolves to, and why, without loading weights.

    Exit code 0: an engine would start; 2: the config is refused; 1: its model or a plugin cannot be used.
    """
    if manifest is not None and not (manifest.absolute().parent.is_dir() and not manifest.is_dir()):
        raise ConfigError(f"--manifest {manifest}: a file cannot be written there; give a path in a folder that exists")
    explanation = explain(layered)
    if explanation.refusal is not None and not as_json:
        print_error(explanation.refusal)
    if as_json:
        typer.echo(json.dumps(as_data(explanation), indent=2, ensure_ascii=False))
    else:
        _print(explanation)
    if explanation.refusal is not None:
        raise typer.Exit(exit_code(explanation.refusal))
    if manifest is not None and explanation.resolved is not None:
        origins = {value.key: value.origin for value in explanation.values}
        write_manifest(explanation.resolved, manifest, origins)


def _print(explanation: Explanation) -> None:
    console = create_console()
    decided = {decision.key: decision for decision in explanation.decisions}
    _print_values(console, explanation, decided)
    _print_choices(console, explanation, decided)
    if explanation.estimate is not None:
        resolved = explanation.resolved
        keeps_latents = resolved is not None and resolved.model.size.latent_size > 0
        _print_memory(console, explanation.estimate, keeps_latents=keeps_latents)
        _print_ranks(console, explanation)
    if explanation.refused_requests:
        _heading(console, "requests that would be refused")
        for line in explanation.refused_requests:
            console.print(f"  - {line}", markup=False)
    for warning in explanation.warnings:
        print_warning(warning)
    if explanation.refusal is not None:
        reason = _first_paragraph(str(explanation.refusal))
        console.print(Text(f"\nrefused: {reason}"), soft_wrap=True)


def _first_paragraph(message: str) -> str:
    """The lines before the first blank one: the reasons, without the traceback of a plugin."""
    return "\n".join(takewhile(str.strip, message.splitlines()))


def _heading(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}", style="bold"))


def _print_values(console: Console, explanation: Explanation, decided: dict[str, Decision]) -> None:
    for section, values in groupby(explanation.values, key=lambda value: value.key.partition(".")[0]):
        _heading(console, section)
        table = Table.grid(padding=(0, 2))
        for value in values:
            notes = [f"over {old!r} ({origin})" for origin, old in value.overrides]
            decision = decided.get(value.key) or decided.get(_name_of_none(value))
            if decision is not None:
                notes.append(f"asked {_plain(decision.asked)}: {decision.reason}")
            if value.key in explanation.remarks:
                notes.append(f"warning: {explanation.remarks[value.key]}")
            key = value.key.partition(".")[2] or section
            table.add_row(*map(Text, (f"  {key}", _plain(value.value), value.origin, "; ".join(notes))))
        console.print(table)
    shown = {key for value in explanation.values for key in (value.key, _name_of_none(value))}
    dropped = [d for d in explanation.decisions if d.key not in shown]
    if dropped:
        _heading(console, "left out")
        for decision in dropped:
            console.print(f"  {decision.key} = {_plain(decision.asked)}: {decision.reason}", markup=False)


def _name_of_none(value: Value) -> str:
    """The key under which the choice of a component was decided that came out as none."""
    return f"{value.key}.name" if value.value is None else value.key


def _print_choices(console: Console, explanation: Explanation, decided: dict[str, Decision]) -> None:
    chosen = [decision for decision in decided.values() if decision.candidates]
    if chosen:
        _heading(console, "choices of auto")
    for decision in chosen:
        console.print(f"  {decision.key}: {_plain(decision.got)} ({decision.reason})", markup=False)
        for name, reasons in decision.candidates:
            verdict = "chosen" if name == decision.got else "; ".join(reasons) or "would do"
            console.print(f"    {name}: {verdict}", markup=False)
    if explanation.resolved is not None:
        _heading(console, "plugins")
        table = Table.grid(padding=(0, 2))
        for component in explanation.resolved.components():
            where = f"{component.distribution} {component.version}" if component.distribution else "local"
            table.add_row(*map(Text, (f"  {component.kind}", component.name, where, component.reference)))
        console.print(table)


def _print_memory(console: Console, estimate: MemoryEstimate, *, keeps_latents: bool) -> None:
    _heading(console, "memory, estimated per rank")
    notes = [] if estimate.served_layers is None else [estimate.served_layers]
    if estimate.copied_bytes:
        notes.append(f"{_size(estimate.copied_bytes)} of them the embedding's table once more, for the output layer")
    about = f" ({'; '.join(notes)})" if notes else ""
    rows = [
        ("parameters", f"{estimate.num_parameters:,} ({_size(estimate.checkpoint_bytes)} on disk)"),
        ("weights", f"{_size(estimate.weight_bytes)}{about}"),
        ("KV per token", f"{estimate.kv_bytes_per_token:,} bytes{', latent vectors' if keeps_latents else ''}"),
    ]
    if estimate.draft_weight_bytes:
        rows.append(("draft models", _size(estimate.draft_weight_bytes)))
    if estimate.target_copy_bytes:
        what = "whole embedding or output layer, for drafters, on the rank that drafts"
        rows.append(("copies", f"{_size(estimate.target_copy_bytes)} ({what})"))
    if estimate.adapter_bytes:
        rows.append(("adapter slots", _size(estimate.adapter_bytes)))
    if estimate.draft_bytes_per_token:
        share = estimate.draft_bytes_per_token / estimate.kv_bytes_per_token
        text = f"{estimate.draft_bytes_per_token:,} bytes of these per token ({share:.1%} of the KV memory)"
        rows.append(("KV of drafters", text))
    if estimate.kv_bytes == 0 and estimate.kv_bytes_per_token == 0:
        rows.append(("KV memory", "none: the model is an encoder, and keeps nothing"))
    elif estimate.kv_bytes is None or estimate.kv_tokens is None or estimate.max_concurrency is None:
        rows.append(("KV memory", "known when the weights are loaded"))
    else:
        rows.append(("KV memory", f"{_size(estimate.kv_bytes)}, {estimate.kv_tokens:,} tokens"))
        rows.append(("concurrency", f"{estimate.max_concurrency:.1f} requests of max_model_len tokens"))
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(f"  {name}"), Text(value))
    console.print(table)


def _print_ranks(console: Console, explanation: Explanation) -> None:
    """Where each rank is, what it holds, and the messages of a step; nothing for a single one."""
    if len(explanation.ranks) < 2:
        return
    _heading(console, "ranks, estimated")
    table = Table.grid(padding=(0, 2))
    titles = ("  rank", "stage", "tensor rank", "layers", "node", "device", "weights", "KV per token", "KV memory")
    table.add_row(*map(Text, titles))
    for rank in explanation.ranks:
        layers = _span(rank.first_layer, rank.num_layers)
        kv_bytes = "known when loaded" if rank.kv_bytes is None else _size(rank.kv_bytes)
        place = (rank.node or "not known", rank.device or "not known")
        memory = (_size(rank.weight_bytes), f"{rank.kv_bytes_per_token:,} bytes", kv_bytes)
        tensor_rank = f"{rank.tensor_rank}, answers" if rank.answers else str(rank.tensor_rank)
        table.add_row(*map(Text, (f"  {rank.rank}", str(rank.stage), tensor_rank, layers, *place, *memory)))
    console.print(table)
    _print_messages(console, explanation)


def _print_messages(console: Console, explanation: Explanation) -> None:
    """How many messages of each kind each rank has."""
    step = explanation.largest_step
    if step is None:
        return
    num_tokens, num_requests = step
    _heading(console, f"messages of a step; bytes where it computes {num_tokens} tokens of {num_requests} requests")
    there = {one.kind for rank in explanation.ranks for one in rank.messages}
    kinds = [kind for kind in _KINDS if kind in there]
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("  rank"), *map(Text, kinds))
    for rank in explanation.ranks:
        found = {one.kind: one for one in rank.messages}
        cells = [_messages(found[kind], step) if kind in found else "" for kind in kinds]
        table.add_row(Text(f"  {rank.rank}"), *map(Text, cells))
    console.print(table)
    if transport := explanation.ranks[0].transport:
        console.print(Text(f"  plans and results: {transport}; their bytes depend on the requests"))


def _messages(messages: StepMessages, step: tuple[int, int]) -> str:
    num_bytes = messages.num_bytes(*step)
    return str(messages.count) if num_bytes is None else f"{messages.count}, {_short(num_bytes)}"


def _short(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes" if num_bytes < 2**20 else _size(num_bytes)


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
