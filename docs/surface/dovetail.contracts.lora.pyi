from dataclasses import dataclass
from dovetail.contracts.errors import RequestError


class AdapterNotFound(RequestError):
    ...


class AdapterConflict(RequestError):
    ...


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ''
    @property
    def name(self) -> str: ...
    @property
    def adapter_id(self) -> int: ...
    @property
    def path(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class LoadedLoRA:
    name: str
    int_id: int
    path: str
    digest: str
    rank: int
    num_bytes: int
    is_in_slot: bool = False
    is_pinned: bool = False
    num_requests: int = 0
