import msgspec
from starlette.requests import Request
from typing import Any, Generic, TypeVar


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    ...

Ignored = Any
T = TypeVar('T', bound=Body)

class BodyReader(Generic[T]):
    def __init__(self, kind: type[T]): ...
    async def read(self, request: Request) -> T: ...
    def decode(self, body: bytes) -> T: ...

def body_schema(kind: type[Body]) -> dict[str, Any]: ...
