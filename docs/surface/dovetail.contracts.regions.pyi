from dataclasses import dataclass
from enum import StrEnum
from typing import Final

WEIGHTS: Final = 'weights'
KV_CACHE: Final = 'kv_cache'
DRAFTER_PREFIX: Final = 'drafter:'

class RegionState(StrEnum):
    RESIDENT = 'resident'
    ASLEEP = 'asleep'
    INVALID = 'invalid'


@dataclass(frozen=True, kw_only=True)
class RegionStatus:
    name: str
    state: RegionState
    level: int = 0
    reason: str = ''

def drafter_region(label: str) -> str: ...
def drafter_label(region: str) -> str | None: ...
