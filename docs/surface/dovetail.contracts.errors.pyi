from typing import Any


class DovetailError(Exception):
    ...


class ConfigError(DovetailError, ValueError):
    ...


class PluginError(DovetailError):
    ...


class ModelError(DovetailError):
    ...


class RequestError(DovetailError, ValueError):
    ...


class QueueFull(RequestError):
    def __init__(self, message: str, *, retry_after_s: float): ...
    retry_after_s: float


class GrammarError(RequestError):
    ...


class GenerationError(RequestError):
    def __init__(self, message: str, outputs: list[Any]): ...
    message: str
    outputs: list[Any]


class CapacityError(DovetailError):
    ...


class WorkerError(DovetailError):
    def __init__(self, message: str, *, rank: int | None = None): ...
    rank: int | None
