"""The errors that cross a contract. Each message says what is wrong and what to do about it."""

from __future__ import annotations

from typing import Any


class DovetailError(Exception):
    """Base of every error that Dovetail raises on purpose."""


class ConfigError(DovetailError, ValueError):
    """The configuration cannot be used: unknown key, bad value, or a combination that is refused."""


class PluginError(DovetailError):
    """A plugin that was named could not be found, imported, or does not speak this host's contract."""


class ModelError(DovetailError):
    """A model could not be found, read or built: missing files, truncated weights, unknown architecture."""


class RequestError(DovetailError, ValueError):
    """One request is invalid. The engine is unharmed and other requests go on."""


class QueueFull(RequestError):
    """The engine has as many requests as it takes. This one may be sent again later."""

    def __init__(self, message: str, *, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds after which to try again."""


class GrammarError(RequestError):
    """What a request asked for as the form of its output cannot be compiled. That shows once the engine has it."""


class GenerationError(RequestError):
    """Some requests of one call failed while they ran. Carries the outputs of all requests."""

    def __init__(self, message: str, outputs: list[Any]):
        super().__init__(message, outputs)
        self.message = message
        self.outputs = outputs
        """`RequestOutput`s in the order of the prompts; those that failed have `error` set."""

    def __str__(self) -> str:
        return self.message


class CapacityError(DovetailError):
    """Memory does not suffice; the message says how much is missing and what would fit."""


class WorkerError(DovetailError):
    """A worker died or failed in mid-run. The executor that raises it has stopped all its workers."""

    def __init__(self, message: str, *, rank: int | None = None):
        super().__init__(message)
        self.rank = rank
