"""From options to a plan: models found, prompts made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.commands.checks import require, require_at_least
from dovetail.plugins.commands.bench.serve.client import Form, Target
from dovetail.plugins.commands.bench.serve.loads import LoadOptions, as_text, describe_asks, read_asks
from dovetail.plugins.commands.bench.serve.session import Connection, Plan, find_model
from dovetail.plugins.commands.bench.serve.settings import Traffic
from dovetail.plugins.commands.bench.serve.tokens import open_tokenizer

_TURNS = 30
"""Turns with several servers, where nobody says how large they are."""


@dataclass(frozen=True)
class Sizes:
    """How many requests run before, and in a turn."""

    warmups: int
    turn: int | None
    """None: chosen by the number of requests."""

    def checked(self, num_servers: int) -> Sizes:
        """Itself. Raises `ConfigError`."""
        require_at_least("--num-warmups", self.warmups, 0)
        if self.turn is not None:
            require_at_least("--turn-size", self.turn, 1)
            require(num_servers > 1, "--turn-size needs several --base-url: one server has no turns")
        return self


@dataclass(frozen=True)
class Planned:
    """A plan, and what the result says of its requests."""

    plan: Plan
    described: Mapping[str, Any]
    warnings: Sequence[str]


async def find_targets(
    connection: Connection, servers: Sequence[tuple[str, str]], models: Sequence[str]
) -> list[Target]:
    """The servers with their models. Raises `ConfigError`, or `DovetailError` where a server lists none."""
    require(
        len(models) in (0, 1, len(servers)),
        f"{len(models)} --model for {len(servers)} --base-url: give one for all, one for each, or none",
    )
    names = list(models) * (len(servers) if len(models) == 1 else 1)
    return [
        Target(label, url, names[index] if names else await find_model(connection, url))
        for index, (label, url) in enumerate(servers)
    ]


def create_plan(
    targets: Sequence[Target],
    load: LoadOptions,
    form: Form,
    traffic: Traffic,
    connection: Connection,
    tokenizer_name: str | None,
    sizes: Sizes,
    *,
    send_text: bool,
) -> Planned:
    """The requests of a load, and some more for the warm-up where the data set has them. Raises `ConfigError`."""
    first = targets[0]
    with open_tokenizer(tokenizer_name, first.base_url, first.model, connection.all_headers()) as tokenizer:
        found = read_asks(load, tokenizer, load.num_prompts + sizes.warmups)
        asks, warnings = found.asks, []
        if form.is_chat or send_text:
            asks = as_text(asks, tokenizer, "a prompt of token ids, sent as text,")
    measured, warmups = asks[: load.num_prompts], asks[load.num_prompts :]
    if len(warmups) < sizes.warmups:
        warmups = measured[: sizes.warmups]
        warnings.append("the data set has no prompts to spare: the warm-up's are measured too, and may be cached")
    turn = len(measured)
    if len(targets) > 1:
        turn = sizes.turn or max(-(-len(measured) // _TURNS), traffic.max_concurrency or 1)
    described = {
        "dataset": load.name,
        **describe_asks(measured),
        "seed": load.seed,
        "speed": load.trace_speed,
        "skipped": found.skipped,
    }
    name = load.path.name if load.path is not None else load.name
    return Planned(Plan(name, targets, measured, warmups, form, traffic, turn), described, warnings)
