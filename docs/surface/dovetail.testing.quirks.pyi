from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Quirk:
    reason: str
    expires: str
    def has_expired(self, version: str) -> bool: ...

def reason_against_quirks(suite: type, quirks: Mapping[str, Any]) -> str | None: ...
def expect_failures(suite: type) -> None: ...
def quirk_of(case: str, quirks: Mapping[str, Quirk]) -> Quirk | None: ...
