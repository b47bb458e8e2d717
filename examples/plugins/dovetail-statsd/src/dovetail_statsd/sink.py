"""The sink `statsd`: steps and requests become counts, gauges and timings."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.telemetry import EngineDescription, RequestStats, StepStats, TelemetrySink
from dovetail_statsd.lines import Format, Lines, Tags
from dovetail_statsd.sender import Sender, resolve
from dovetail_statsd.sums import Sums


class StatsDOptions(PluginOptions):
    """Options of `statsd`."""

    host: str = Field(default="localhost", min_length=1, description="Who receives the lines.")
    port: int = Field(default=8125, ge=1, le=65535, description="Its UDP port.")
    prefix: str = Field(default="dovetail", pattern=r"^[^:|@#\s]*$", description="In front of every name, with a dot.")
    format: Format = Field(default="statsd", description="dogstatsd: with tags.")
    tags: dict[str, str] = Field(default_factory=dict, description="On every line; of dogstatsd alone.")
    flush_s: PositiveFloat = Field(default=1.0, description="Seconds between two flushes.")
    packet_bytes: PositiveInt = Field(default=1432, description="Most bytes of a datagram.")
    max_timings: PositiveInt = Field(default=10_000, description="Timings that are kept between two flushes.")


class StatsDSink(TelemetrySink):
    """Sums between two flushes; a thread sends the sums."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = StatsDOptions

    @classmethod
    def check(cls, need: Any, options: Any, environment: Environment) -> list[str]:
        """Plain StatsD has no tags."""
        if options.tags and options.format == "statsd":
            return ["lines of the format statsd have no tags: set format: dogstatsd, or put them into prefix"]
        return []

    def __init__(self, options: StatsDOptions):
        super().__init__(options)
        try:
            self._family, self._address = resolve(options.host, options.port)
        except OSError as error:
            raise ConfigError(
                f"telemetry sink statsd finds no address of {options.host!r} ({error}): correct host"
            ) from error
        self._options = options
        self._sums: Sums | None = None
        self._sender: Sender | None = None
        self._prefix_tokens = (0, 0)
        """Prompt tokens looked up and found in the prefix cache, up to the last step."""

    def on_start(self, engine: EngineDescription) -> None:
        """Begins to send. Where the KV memory was replaced, goes on as before."""
        if self._sums is not None:
            return
        options = self._options
        lines = Lines(options.format, options.prefix, {"model": engine.model, **options.tags})
        self._sums = Sums(lines, options.max_timings)
        self._sender = Sender(
            self._sums, self._family, self._address, flush_s=options.flush_s, packet_bytes=options.packet_bytes
        )
        self._sender.start()

    def on_step(self, stats: StepStats) -> None:
        """Adds a step."""
        if self._sums is None:
            return
        looked_up, found = self._prefix_tokens
        self._prefix_tokens = stats.prefix_query_tokens, stats.prefix_hit_tokens
        self._sums.add(
            counts={
                "steps": 1,
                "prompt_tokens": stats.num_prompt_tokens,
                "generated_tokens": stats.num_generated_tokens,
                "preemptions": stats.num_preempted,
                "draft_tokens": stats.num_drafted,
                "accepted_tokens": stats.num_accepted,
                "prefix_query_tokens": max(0, stats.prefix_query_tokens - looked_up),
                "prefix_hit_tokens": max(0, stats.prefix_hit_tokens - found),
            },
            gauges={
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "kv_usage": stats.kv_blocks_used / max(1, stats.kv_blocks_total),
            },
            timings={"step_duration": stats.duration},
        )

    def on_request(self, stats: RequestStats) -> None:
        """Adds a request that ended."""
        if self._sums is None:
            return
        self._sums.add(
            counts={"requests": 1},
            gauges={},
            timings=_timings(stats),
            labels=(("finish_reason", stats.finish_reason),),
            tags=_tags(stats),
        )

    def close(self) -> None:
        """Sends the rest."""
        if self._sender is not None:
            self._sender.close()


def _timings(stats: RequestStats) -> dict[str, float]:
    """Seconds, as far as the request came."""
    timings = {"request_duration": stats.finish_time - stats.arrival_time}
    if stats.first_scheduled_time is not None:
        timings["queue_time"] = stats.first_scheduled_time - stats.arrival_time
    if stats.first_token_time is not None:
        timings["time_to_first_token"] = stats.first_token_time - stats.arrival_time
        others = stats.num_generated_tokens / max(1, stats.n) - 1
        if others > 0:
            timings["time_per_output_token"] = (stats.finish_time - stats.first_token_time) / others
    return timings


def _tags(stats: RequestStats) -> Tags:
    """Of few values each: neither ids, nor texts of errors, nor versions of the weights."""
    tags: Tags = (("drafter", stats.drafter or "none"),)
    if stats.assignment is not None:
        tags += (("experiment", stats.assignment.experiment), ("arm", stats.assignment.arm))
    return tags
