"""Low-rank adapters (LoRA, Hu et al. 2021): small changes of the weights that requests choose by name."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.contracts.errors import RequestError


class AdapterNotFound(RequestError):
    """No adapter of this name is loaded, or its files are not there."""


class AdapterConflict(RequestError):
    """The adapter cannot be changed as asked while it is as it is: requests use it, or its name is another's."""


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, as a request names it. The names are vLLM's. Raises `RequestError` for values that name nothing."""

    lora_name: str
    """What it is called: in requests, outputs and measurements. One adapter has one name at a time."""
    lora_int_id: int = 0
    """A number that stands for it as well, where it is not 0. Dovetail tells adapters apart by name."""
    lora_path: str = ""
    """Folder with PEFT's files. Empty: an adapter that is loaded."""

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name.strip():
            raise RequestError(f"lora_name {self.lora_name!r} is no name: give text that requests can call it by")
        if type(self.lora_int_id) is not int or self.lora_int_id < 0:
            raise RequestError(f"lora_int_id {self.lora_int_id!r} must be an integer above 0, or 0 for none")
        if not isinstance(self.lora_path, str):
            raise RequestError(f"lora_path {self.lora_path!r} must be the path of a folder, as text")

    @property
    def name(self) -> str:
        """As `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """As `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """As `lora_path`."""
        return self.lora_path


@dataclass(frozen=True, kw_only=True)
class LoadedLoRA:
    """An adapter that an engine has. It travels between processes, so everything in it is plain data."""

    name: str
    int_id: int
    path: str
    digest: str
    """Hash of its content, in hexadecimal: equal adapters have equal ones, whatever they are called."""
    rank: int
    """The largest of its layers'."""
    num_bytes: int
    """Of its tensors."""
    is_in_slot: bool = False
    """Whether the workers have it next to the weights, so that a step need not bring it there."""
    is_pinned: bool = False
    num_requests: int = 0
    """Requests that use it and have not ended."""
