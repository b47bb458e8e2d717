from dovetail.contracts.errors import RequestError
from typing import Final, Literal

PauseMode = Literal['abort', 'wait', 'keep']
PAUSE_MODES: Final[tuple[PauseMode, ...]] = ('abort', 'wait', 'keep')

class EngineConflict(RequestError):
    ...

def as_pause_mode(mode: object) -> PauseMode: ...
def check_level(level: object) -> None: ...
