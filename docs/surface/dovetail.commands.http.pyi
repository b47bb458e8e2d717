import httpx
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "Failure",
    "create_client",
    "error_message",
    "parse_base_url",
    "status_failure",
    "transport_failure",
    "without_password",
]

@dataclass(frozen=True)
class Failure:
    kind: str
    message: str

def create_client(
    *,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    uds: str | None = None,
) -> httpx.AsyncClient: ...
def error_message(body: bytes) -> str: ...
def parse_base_url(option: str, text: str) -> str: ...
def status_failure(status: int, body: bytes) -> Failure: ...
def transport_failure(error: httpx.HTTPError) -> Failure: ...
def without_password(url: str) -> str: ...
